// Causal attention of one query head and one token over the rows of the cache up to its own, by an online softmax over
// 64 rows at a time; or, of `one` token, over a page at once: a thread has a row's score, then some values of some rows.
// Scores are plain products: their scale stands in the queries.
// `one`: one token of each stream, whose queries, key and value are still without norm and RoPE and whose row is not in the
// cache; a page of the cache for each workgroup. `end`: their findings stay "apart" for attention_merge.wgsl, or the last
// workgroup of a head puts them together "here"; "spread": of one stream, and x += V y with it.
// `gate`: what a head gives is multiplied with the sigmoid of its gate (Qwen3.5).
{% set values = 8 if half else 4 %}
{% set whole = one and head_dim % 8 == 0 and head_dim <= 256 and page <= 256 %}
{% set threads = 256 if whole else 64 %}
{% set wide_row = "(2u * H + 2u * G)" if gate else "(H + 2u * G)" %}
{% set width = "vec4<%s>" % ("u32" if half else "f32") if whole else ("u32" if half else "f32") %}
const H = {{ heads }}u;
const G = {{ kv_heads }}u;
@group(0) @binding(0) var<storage, read> QKV: array<f32>;  // (T, H + 2 G, D), with a gate (T, 2 H + 2 G, D)
{% if one %}
@group(0) @binding(1) var<storage, read> P: array<vec4<f32>>;  // gain of queries (D), of keys (D), see Vectors
{{ "@coherent " if end != "apart" }}@group(0) @binding(4) var<storage, read_write> PARTS: array<f32>;  // (streams, H, most_pages, D + 2)
{% set at = 2 %}
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
{% if gate and (not one or end != "apart") %}
{% include "output_gate.wgsl" %}
{% endif %}
{% include "control.wgsl" %}
{% include "pages.wgsl" %}
@group(1) @binding(1) var<storage, read_write> KEY: array<{{ width }}>;  // (rows of all pages, G, D)
@group(1) @binding(2) var<storage, read_write> VALUE: array<{{ width }}>;  // (rows of all pages, G, D)

{% if whole %}
const COLUMNS = {{ head_dim // values }}u;  // of 16 bytes, of a row
const GROUPS = {{ threads * values // head_dim }}u;  // of threads, each with every GROUPS-th row
var<workgroup> query: array<vec4<f32>, {{ head_dim // 4 }}>;
var<workgroup> scores: array<f32, 256>;
var<workgroup> found: array<f32, 256>;
var<workgroup> partial: array<vec4<f32>, {{ 256 * values // 4 }}>;
{% else %}
var<workgroup> query: array<f32, {{ head_dim }}>;
var<workgroup> scores: array<f32, 64>;
{% endif %}
{% if one %}
{# Of the token itself, as the cache has them: other threads read them, so no compiler drops the rounding. #}
{% set kept = head_dim // values if whole else head_dim // 2 if half else head_dim %}
var<workgroup> key: array<{{ width }}, {{ kept }}>;
var<workgroup> value: array<{{ width }}, {{ kept }}>;

fn begin_row(li: u32, at: u32) {
  workgroupBarrier();
  for (var i = li; i < D; i += {{ threads }}u) { row[i] = QKV[at + i]; }
  workgroupBarrier();
}
{% endif %}
{% if whole %}
{# Value i of the four or eight in a vector of the cache, as vectors of four. #}
{% macro wide(v, j) %}
{%- if half -%} vec4<f32>(unpack2x16float({{ v }}[{{ 2 * j }}]), unpack2x16float({{ v }}[{{ 2 * j + 1 }}]))
{%- else -%} {{ v }}
{%- endif -%}
{% endmacro %}
{% endif %}

@compute @workgroup_size({{ threads }})
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
  let heads = stream * {{ wide_row }};
  begin_row(li, (heads + group.x) * D);
  {% if qk_eps is not none %}
  norm(li, {{ q_norm }}u);
  {% endif %}
  {% if whole %}
  for (var i = li; i < D / 4u; i += {{ threads }}u) {
    query[i] = vec4<f32>(
      turned(4u * i, position), turned(4u * i + 1u, position), turned(4u * i + 2u, position), turned(4u * i + 3u, position)
    );
  }
  {% else %}
  for (var i = li; i < D; i += 64u) { query[i] = turned(i, position); }
  {% endif %}
  if (rows > position) {  // the token's own row is in this page
    begin_row(li, (heads + H + g) * D);
    {% if qk_eps is not none %}
    norm(li, {{ k_norm }}u);
    {% endif %}
    let own = (placed(slot, position) * G + g) * D;
    let first = (heads + H + G + g) * D;
    let writes = group.x % (H / G) == 0u;
    {% if whole %}
    for (var i = li; i < COLUMNS; i += {{ threads }}u) {  // rounded, as they are read from now on
      let e = i * {{ values }}u;
      {% if half %}
      key[i] = vec4<u32>(
        {% for j in range(4) %}
        packed(turned(e + {{ 2 * j }}u, position), turned(e + {{ 2 * j + 1 }}u, position)),
        {% endfor %}
      );
      value[i] = vec4<u32>(
        {% for j in range(4) %}
        packed(QKV[first + e + {{ 2 * j }}u], QKV[first + e + {{ 2 * j + 1 }}u]),
        {% endfor %}
      );
      {% else %}
      key[i] = vec4<f32>({% for j in range(4) %}turned(e + {{ j }}u, position), {% endfor %});
      value[i] = vec4<f32>({% for j in range(4) %}QKV[first + e + {{ j }}u], {% endfor %});
      {% endif %}
      if (writes) {
        KEY[own / {{ values }}u + i] = key[i];
        VALUE[own / {{ values }}u + i] = value[i];
      }
    }
    {% elif half %}
    for (var i = 2u * li; i < D; i += 128u) {  // rounded, as they are read from now on
      let k = packed(turned(i, position), turned(i + 1u, position));
      let v = packed(QKV[first + i], QKV[first + i + 1u]);
      if (writes) {
        KEY[(own + i) / 2u] = k;
        VALUE[(own + i) / 2u] = v;
      }
      key[i / 2u] = k;
      value[i / 2u] = v;
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
  let from0 = (group.y * {{ wide_row }} + group.x) * D;
  let to = (group.y * H + group.x) * D;
  for (var i = li; i < D; i += 64u) { query[i] = QKV[from0 + i]; }
  {% endif %}
  workgroupBarrier();
  {% if whole %}
  let cached = placed(slot, begin) * G + g;  // the first row of this page
  let count = rows - begin;
  var score = -3.4e38;
  if (begin + li < rows) {
    let own = begin + li == position;
    let at = (cached + li * G) * COLUMNS;
    var sum = vec4<f32>();
    {% for first in range(0, head_dim // values, 4) %}
    {
      {% for j in range(first, [first + 4, head_dim // values] | min) %}
      var k{{ j }} = key[{{ j }}];
      if (!own) { k{{ j }} = KEY[at + {{ j }}u]; }
      {% endfor %}
      {% for j in range(first, [first + 4, head_dim // values] | min) %}
      {% for e in range(values // 4) %}
      sum = fma({{ wide("k%d" % j, e) }}, query[{{ j * values // 4 + e }}], sum);
      {% endfor %}
      {% endfor %}
    }
    {% endfor %}
    score = (sum.x + sum.y) + (sum.z + sum.w);
  }
  found[li] = score;
  workgroupBarrier();
  for (var step = 128u; step > 0u; step /= 2u) {
    if (li < step) { found[li] = max(found[li], found[li + step]); }
    workgroupBarrier();
  }
  let largest = found[0];
  workgroupBarrier();
  let share = select(0.0, exp(score - largest), begin + li < rows);
  scores[li] = share;
  found[li] = share;
  workgroupBarrier();
  {
    {% for e in range(values // 4) %}
    var sum{{ e }} = vec4<f32>();
    {% endfor %}
    let column = li % COLUMNS;
    if (li < COLUMNS * GROUPS) {
      for (var r = li / COLUMNS; r < count; r += GROUPS) {
        var v = value[column];
        if (begin + r != position) { v = VALUE[(cached + r * G) * COLUMNS + column]; }
        {% for e in range(values // 4) %}
        sum{{ e }} = fma(vec4<f32>(scores[r]), {{ wide("v", e) }}, sum{{ e }});
        {% endfor %}
      }
    }
    {% for e in range(values // 4) %}
    partial[li * {{ values // 4 }}u + {{ e }}u] = sum{{ e }};
    {% endfor %}
  }
  for (var step = 128u; step > 0u; step /= 2u) {
    if (li < step) { found[li] += found[li + step]; }
    workgroupBarrier();
  }
  let weight = found[0];
  for (var d = li; d < D; d += {{ threads }}u) {
    var sum = 0.0;
    for (var i = 0u; i < GROUPS; i++) {
      sum += partial[(i * COLUMNS + d / {{ values }}u) * {{ values // 4 }}u + d % {{ values }}u / 4u][d % 4u];
    }
    PARTS[to + d] = sum;
  }
  {% else %}
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
        score += dot(vec2<f32>(query[i], query[i + 1u]), unpack2x16float(key[i / 2u]));
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
        if (count < 64u && rows > position) { sum += scores[count] * {{ "unpack2x16float(value[d / 2u])[d % 2u]" if half else "value[d]" }}; }
        {% endif %}
      }
      out{{ e }} = sum;
    }
    {% endfor %}
    workgroupBarrier();
  }
  {% for e in range(per_thread) %}
  if (li + {{ 64 * e }}u < D) {
    {{ "PARTS" if one else "Y" }}[to + li + {{ 64 * e }}u] = out{{ e }}{{ "" if one else " / weight * gate_of(group.y, group.x, li + %du)" % (64 * e) if gate else " / weight" }};
  }
  {% endfor %}
  {% endif %}
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
  for (var d = li; d < D; d += {{ threads }}u) { Y[(stream * H + group.x) * D + d] = merged(parts, pages, top, d) / whole{{ " * gate_of(stream, group.x, d)" if gate }}; }
  {% else %}
  for (var d = li; d < D; d += {{ threads }}u) { slice[d / 4u][d % 4u] = merged(parts, pages, top, d) / whole{{ " * gate_of(stream, group.x, d)" if gate }}; }
  workgroupBarrier();
  spread(group.x, li);
  if (arrives_last(li, 0u, SLICES)) { finish(li); }
  {% endif %}
  {% endif %}
  {% endif %}
}
