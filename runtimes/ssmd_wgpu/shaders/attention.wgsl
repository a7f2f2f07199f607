// Causal attention of one query head and one token over the rows of the cache up to its own, by an online softmax over
// 64 rows at a time. Scores are plain products: their scale stands in the queries.
// `one`: of one token of each stream; a page of the cache for each workgroup, whose sums attention_merge.wgsl puts
// together.
const H = {{ heads }}u;
const G = {{ kv_heads }}u;
const D = {{ head_dim }}u;
@group(0) @binding(0) var<storage, read> QKV: array<f32>;  // (T, H + 2 G, D)
@group(0) @binding(1) var<storage, read_write> Y: array<f32>;  // (T, H, D); one: (streams, H, most_pages, D + 2), largest and weight last
{% include "control.wgsl" %}
{% include "pages.wgsl" %}
@group(1) @binding(1) var<storage, read_write> KEY: array<{{ "u32" if half else "f32" }}>;  // (rows of all pages, G, D)
@group(1) @binding(2) var<storage, read_write> VALUE: array<{{ "u32" if half else "f32" }}>;  // (rows of all pages, G, D)

var<workgroup> query: array<f32, {{ head_dim }}>;
var<workgroup> scores: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let g = group.x / (H / G);
  {% if one %}
  let stream = group.y % CTL[1];
  let part = group.y / CTL[1];
  let begin = part * {{ page }}u;
  let rows = min(CTL[4u * stream] + 1u, begin + {{ page }}u);
  if (begin >= rows) { return; }
  let slot = CTL[4u * stream + 2u];
  let from0 = (stream * (H + 2u * G) + group.x) * D;
  let to = ((stream * H + group.x) * {{ most_pages }}u + part) * (D + 2u);
  {% else %}
  let begin = 0u;
  let slot = CTL[2];
  let rows = CTL[0] + group.y + 1u;
  let from0 = (group.y * (H + 2u * G) + group.x) * D;
  let to = (group.y * H + group.x) * D;
  {% endif %}
  for (var i = li; i < D; i += 64u) { query[i] = QKV[from0 + i]; }
  workgroupBarrier();
  var largest = -3.4e38;
  var weight = 0.0;
  {% for e in range(per_thread) %}
  var out{{ e }} = 0.0;
  {% endfor %}
  for (var first = begin; first < rows; first += 64u) {
    let row = first + li;
    let cached = placed(slot, first);  // where these 64 rows begin
    var score = -3.4e38;
    if (row < rows) {
      score = 0.0;
      let at = ((cached + li) * G + g) * D;
      {% if half %}
      for (var i = 0u; i < D; i += 2u) {
        score += dot(vec2<f32>(query[i], query[i + 1u]), unpack2x16float(KEY[(at + i) / 2u]));
      }
      {% else %}
      for (var i = 0u; i < D; i++) { score += query[i] * KEY[at + i]; }
      {% endif %}
    }
    scores[li] = score;
    workgroupBarrier();
    var most = largest;
    for (var i = 0u; i < 64u; i++) { most = max(most, scores[i]); }
    workgroupBarrier();
    scores[li] = select(0.0, exp(score - most), row < rows);
    workgroupBarrier();
    let shrink = exp(largest - most);
    largest = most;
    weight *= shrink;
    for (var i = 0u; i < 64u; i++) { weight += scores[i]; }
    let count = min(64u, rows - first);
    {% for e in range(per_thread) %}
    {
      let d = li + {{ 64 * e }}u;
      var sum = out{{ e }} * shrink;
      if (d < D) {
        for (var i = 0u; i < count; i++) {
          let at = ((cached + i) * G + g) * D + d;
          sum += scores[i] * {{ "unpack2x16float(VALUE[at / 2u])[at % 2u]" if half else "VALUE[at]" }};
        }
      }
      out{{ e }} = sum;
    }
    {% endfor %}
    workgroupBarrier();
  }
  {% for e in range(per_thread) %}
  if (li + {{ 64 * e }}u < D) { Y[to + li + {{ 64 * e }}u] = out{{ e }}{{ "" if one else " / weight" }}; }
  {% endfor %}
  {% if one %}
  if (li == 0u) {
    Y[to + D] = largest;
    Y[to + D + 1u] = weight;
  }
  {% endif %}
}
