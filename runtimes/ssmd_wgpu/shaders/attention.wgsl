// Causal attention of one query head and one token over the rows of the cache up to its own, by an online softmax over
// 64 rows at a time. Scores are plain products: their scale stands in the queries.
// `one`: one token of each stream, whose queries, key and value are still without norm and RoPE and whose row is not in the
// cache; a page of the cache for each workgroup. `end`: their findings stay "apart" for attention_merge.wgsl, or the last
// workgroup of a head puts them together "here"; "spread": of one stream, and x += V y with it.
const H = {{ heads }}u;
const G = {{ kv_heads }}u;
@group(0) @binding(0) var<storage, read> QKV: array<f32>;  // (T, H + 2 G, D)
{% if one %}
@group(0) @binding(1) var<storage, read> P: array<vec4<f32>>;  // gain of queries (D), of keys (D), see Vectors
{{ "@coherent " if end != "apart" }}@group(0) @binding(4) var<storage, read_write> PARTS: array<f32>;  // (streams, H, most_pages, D + 2)
{% set at = 2 %}
{% set threads = 64 %}
{% include "vectors.wgsl" %}
{% include "rope.wgsl" %}
{% if end == "spread" %}
{% set at = 5 %}
{% set v_scaled = false %}
{% include "spread.wgsl" %}
{% elif end == "here" %}
@group(0) @binding(5) var<storage, read_write> Y: array<f32>;  // (streams, H, D)
{% set count_at = 6 %}
{% include "arrive.wgsl" %}
{% endif %}
{% if end != "apart" %}
{% include "merge.wgsl" %}
{% endif %}
{% else %}
const D = {{ head_dim }}u;
@group(0) @binding(1) var<storage, read_write> Y: array<f32>;  // (T, H, D)
{% endif %}
{% include "control.wgsl" %}
{% include "pages.wgsl" %}
@group(1) @binding(1) var<storage, read_write> KEY: array<{{ "u32" if half else "f32" }}>;  // (rows of all pages, G, D)
@group(1) @binding(2) var<storage, read_write> VALUE: array<{{ "u32" if half else "f32" }}>;  // (rows of all pages, G, D)

var<workgroup> query: array<f32, {{ head_dim }}>;
var<workgroup> scores: array<f32, 64>;
{% if one %}
var<workgroup> key: array<f32, {{ head_dim }}>;  // of the token itself
var<workgroup> value: array<f32, {{ head_dim }}>;

fn begin_row(li: u32, at: u32) {
  workgroupBarrier();
  for (var i = li; i < D; i += 64u) { row[i] = QKV[at + i]; }
  workgroupBarrier();
}
{% endif %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let g = group.x / (H / G);
  {% if one %}
  let stream = group.y % CTL[1];
  let part = group.y / CTL[1];
  let begin = part * {{ page }}u;
  let position = CTL[4u * stream];
  let rows = min(position + 1u, begin + {{ page }}u);
  if (begin >= rows) { return; }
  let slot = CTL[4u * stream + 2u];
  let parts = (stream * H + group.x) * {{ most_pages }}u * (D + 2u);
  let to = parts + part * (D + 2u);
  let heads = stream * (H + 2u * G);
  begin_row(li, (heads + group.x) * D);
  {% if qk_eps is not none %}
  norm(li, {{ q_norm }}u);
  {% endif %}
  for (var i = li; i < D; i += 64u) { query[i] = turned(i, position); }
  if (rows > position) {  // the token's own row is in this page
    begin_row(li, (heads + H + g) * D);
    {% if qk_eps is not none %}
    norm(li, {{ k_norm }}u);
    {% endif %}
    let own = (placed(slot, position) * G + g) * D;
    let first = (heads + H + G + g) * D;
    let writes = group.x % (H / G) == 0u;
    {% if half %}
    for (var i = 2u * li; i < D; i += 128u) {  // rounded, as they are read from now on
      let k = packed(turned(i, position), turned(i + 1u, position));
      let v = packed(QKV[first + i], QKV[first + i + 1u]);
      if (writes) {
        KEY[(own + i) / 2u] = k;
        VALUE[(own + i) / 2u] = v;
      }
      let wide_k = unpack2x16float(k);
      let wide_v = unpack2x16float(v);
      key[i] = wide_k.x;
      key[i + 1u] = wide_k.y;
      value[i] = wide_v.x;
      value[i + 1u] = wide_v.y;
    }
    {% else %}
    for (var i = li; i < D; i += 64u) {
      key[i] = turned(i, position);
      value[i] = QKV[first + i];
      if (writes) {
        KEY[own + i] = key[i];
        VALUE[own + i] = value[i];
      }
    }
    {% endif %}
  }
  {% else %}
  let begin = 0u;
  let slot = CTL[2];
  let rows = CTL[0] + group.y + 1u;
  let from0 = (group.y * (H + 2u * G) + group.x) * D;
  let to = (group.y * H + group.x) * D;
  for (var i = li; i < D; i += 64u) { query[i] = QKV[from0 + i]; }
  {% endif %}
  workgroupBarrier();
  var largest = -3.4e38;
  var weight = 0.0;
  {% for e in range(per_thread) %}
  var out{{ e }} = 0.0;
  {% endfor %}
  for (var first = begin; first < rows; first += 64u) {
    let at_row = first + li;
    let cached = placed(slot, first);  // where these 64 rows begin
    let count = min(64u, {{ "position" if one else "rows" }} - first);  // of them in the cache
    var score = -3.4e38;
    if (li < count) {
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
    {% if one %}
    if (at_row == position) {
      score = 0.0;
      {% if half %}
      for (var i = 0u; i < D; i += 2u) {
        score += dot(vec2<f32>(query[i], query[i + 1u]), vec2<f32>(key[i], key[i + 1u]));
      }
      {% else %}
      for (var i = 0u; i < D; i++) { score += query[i] * key[i]; }
      {% endif %}
    }
    {% endif %}
    scores[li] = score;
    workgroupBarrier();
    var most = largest;
    for (var i = 0u; i < 64u; i++) { most = max(most, scores[i]); }
    workgroupBarrier();
    scores[li] = select(0.0, exp(score - most), at_row < rows);
    workgroupBarrier();
    let shrink = exp(largest - most);
    largest = most;
    weight *= shrink;
    for (var i = 0u; i < 64u; i++) { weight += scores[i]; }
    {% for e in range(per_thread) %}
    {
      let d = li + {{ 64 * e }}u;
      var sum = out{{ e }} * shrink;
      if (d < D) {
        for (var i = 0u; i < count; i++) {
          let at = ((cached + i) * G + g) * D + d;
          sum += scores[i] * {{ "unpack2x16float(VALUE[at / 2u])[at % 2u]" if half else "VALUE[at]" }};
        }
        {% if one %}
        if (count < 64u && rows > position) { sum += scores[count] * value[d]; }
        {% endif %}
      }
      out{{ e }} = sum;
    }
    {% endfor %}
    workgroupBarrier();
  }
  {% for e in range(per_thread) %}
  if (li + {{ 64 * e }}u < D) {
    {{ "PARTS" if one else "Y" }}[to + li + {{ 64 * e }}u] = out{{ e }}{{ "" if one else " / weight" }};
  }
  {% endfor %}
  {% if one %}
  if (li == 0u) {
    PARTS[to + D] = largest;
    PARTS[to + D + 1u] = weight;
  }
  {% if end != "apart" %}
  let pages = position / {{ page }}u + 1u;
  if (!arrives_last(li, 1u + stream * H + group.x, pages)) { return; }
  let top = largest_of(parts, pages);
  let whole = merged(parts, pages, top, D + 1u);
  {% if end == "here" %}
  for (var d = li; d < D; d += 64u) { Y[(stream * H + group.x) * D + d] = merged(parts, pages, top, d) / whole; }
  {% else %}
  for (var d = li; d < D; d += 64u) { slice[d / 4u][d % 4u] = merged(parts, pages, top, d) / whole; }
  workgroupBarrier();
  spread(group.x, li);
  if (arrives_last(li, 0u, SLICES)) { finish(li); }
  {% endif %}
  {% endif %}
  {% endif %}
}
