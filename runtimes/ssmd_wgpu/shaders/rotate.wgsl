// Norms of queries and keys where the family has them, RoPE (arXiv:2104.09864), and the new rows of the KV cache.
// `one`: of a token of each stream. A workgroup for each head of a token: H query heads (changed in place), G key heads, G value heads.
{% include "vectors.wgsl" %}

const H = {{ heads }}u;
const G = {{ kv_heads }}u;
const D = {{ head_dim }}u;
const HALF = {{ rotated // 2 }}u;
@group(0) @binding(0) var<storage, read_write> QKV: array<f32>;  // (T, H + 2 G, D)
@group(0) @binding(1) var<storage, read> P: array<vec4<f32>>;  // gain of queries (D), of keys (D), see Vectors
{% if rotated %}
@group(0) @binding(2) var<storage, read> COS: array<f32>;  // (context, HALF)
@group(0) @binding(3) var<storage, read> SIN: array<f32>;  // (context, HALF)
{% endif %}
{% include "control.wgsl" %}
{% include "pages.wgsl" %}
@group(1) @binding(1) var<storage, read_write> KEY: array<{{ "u32" if half else "f32" }}>;  // (rows of all pages, G, D)
@group(1) @binding(2) var<storage, read_write> VALUE: array<{{ "u32" if half else "f32" }}>;  // (rows of all pages, G, D)

var<workgroup> row: array<f32, {{ head_dim }}>;
var<workgroup> sums: array<f32, 64>;

fn turned(i: u32, position: u32) -> f32 {
{% if rotated %}
  if (i < HALF) { return row[i] * COS[position * HALF + i] - row[i + HALF] * SIN[position * HALF + i]; }
  if (i < 2u * HALF) {
    let j = i - HALF;
    return row[i] * COS[position * HALF + j] + row[j] * SIN[position * HALF + j];
  }
{% endif %}
  return row[i];
}
{% if half %}

fn packed(x: f32, y: f32) -> u32 {  // rounding must not overflow to infinity
  return pack2x16float(clamp(vec2<f32>(x, y), vec2<f32>(-65504.0), vec2<f32>(65504.0)));
}
{% endif %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let head = group.x;
  let from0 = (group.y * (H + 2u * G) + head) * D;
  {% if one %}
  let stream = group.y;
  let position = CTL[4u * stream];
  {% else %}
  let stream = 0u;
  let position = CTL[0] + group.y;
  {% endif %}
  for (var i = li; i < D; i += 64u) { row[i] = QKV[from0 + i]; }
  workgroupBarrier();
  {% if qk_eps is not none %}
  if (head < H + G) {
    var sum = 0.0;
    for (var i = li; i < D; i += 64u) { sum += row[i] * row[i]; }
    sums[li] = sum;
  }
  workgroupBarrier();
  if (head < H + G) {
    var sum = 0.0;
    for (var i = 0u; i < 64u; i++) { sum += sums[i]; }
    let rms = inverseSqrt(sum / f32(D) + {{ qk_eps }});
    let gain = select({{ k_norm }}u, {{ q_norm }}u, head < H);
    for (var i = li; i < D; i += 64u) { row[i] *= rms * p(gain + i); }
  }
  workgroupBarrier();
  {% endif %}
  if (head < H) {
    for (var i = li; i < D; i += 64u) { QKV[from0 + i] = turned(i, position); }
  } else {
    let is_key = head < H + G;
    let to = (placed(CTL[4u * stream + 2u], position) * G + (head - H) % G) * D;
    {% if half %}
    for (var i = 2u * li; i < D; i += 128u) {
      if (is_key) {
        KEY[(to + i) / 2u] = packed(turned(i, position), turned(i + 1u, position));
      } else {
        VALUE[(to + i) / 2u] = packed(row[i], row[i + 1u]);
      }
    }
    {% else %}
    for (var i = li; i < D; i += 64u) {
      if (is_key) { KEY[to + i] = turned(i, position); } else { VALUE[to + i] = row[i]; }
    }
    {% endif %}
  }
}
