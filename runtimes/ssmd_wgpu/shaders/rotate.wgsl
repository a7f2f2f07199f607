// Of T tokens: norms and RoPE of queries (changed in place), and the new rows of the KV cache. A workgroup for each head
// of a token: H query heads, G key heads, G value heads; a `gate` of H heads, which may follow, stays as it is.
{% include "vectors.wgsl" %}

const H = {{ heads }}u;
const G = {{ kv_heads }}u;
@group(0) @binding(0) var<storage, read_write> QKV: array<f32>;  // (T, H + 2 G, D), with a gate (T, 2 H + 2 G, D)
@group(0) @binding(1) var<storage, read> P: array<vec4<f32>>;  // gain of queries (D), of keys (D), see Vectors
{% set at = 2 %}
{% set threads = 64 %}
{% include "rope.wgsl" %}
{% include "control.wgsl" %}
{% include "pages.wgsl" %}
@group(1) @binding(1) var<storage, read_write> KEY: array<{{ "u32" if half else "f32" }}>;  // (rows of all pages, G, D)
@group(1) @binding(2) var<storage, read_write> VALUE: array<{{ "u32" if half else "f32" }}>;  // (rows of all pages, G, D)

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let head = group.x;
  let from0 = (group.y * {{ "(2u * H + 2u * G)" if gate else "(H + 2u * G)" }} + head) * D;
  let position = CTL[0] + group.y;
  for (var i = li; i < D; i += 64u) { row[i] = QKV[from0 + i]; }
  workgroupBarrier();
  {% if qk_eps is not none %}
  if (head < H + G) { norm(li, select({{ k_norm }}u, {{ q_norm }}u, head < H)); }
  {% endif %}
  if (head < H) {
    for (var i = li; i < D; i += 64u) { QKV[from0 + i] = turned(i, position); }
  } else {
    let is_key = head < H + G;
    let to = (placed(CTL[2], position) * G + (head - H) % G) * D;
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
