// Gated DeltaNet over T tokens, 1 of 2: q and k of length 1, in place, q by 1 / sqrt(K); the decay and beta of every head. L
// threads have a key head of a token.
{% import "delta.wgsl" as delta with context %}
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}

{{ delta.declare() }}
const L = {{ lanes }}u;
@group(0) @binding(0) var<storage, read_write> U: array<f32>;  // (T, u_stride): q (G, K), k (G, K), v (H, D)
@group(0) @binding(1) var<storage, read> P: array<vec4<f32>>;  // A (H), dt_bias (H), see Vectors
@group(0) @binding(2) var<storage, read> BC: array<f32>;  // (T, 2 H): b, a
@group(0) @binding(3) var<storage, read_write> DT: array<f32>;  // (T, H): beta
@group(0) @binding(4) var<storage, read_write> LOGS: array<f32>;  // (T, H): the decay

var<workgroup> sums: array<vec2<f32>, 64>;

{{ delta.declare_gates() }}
@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let lane = li % L;
  let first = li - lane;
  let g = min(group.x * {{ 64 // lanes }}u + li / L, G - 1u);
  let live = group.x * {{ 64 // lanes }}u + li / L < G;
  let q = group.y * {{ u_stride }}u + g * K;
  let k = q + G * K;
  var sum = vec2<f32>();
  for (var i = lane; i < K; i += L) {
    let x = vec2<f32>(U[q + i], U[k + i]);
    sum += x * x;
  }
  sums[li] = sum;
  workgroupBarrier();
  sum = vec2<f32>();
  for (var i = 0u; i < L; i++) { sum += sums[first + i]; }
  let scale = inverseSqrt(sum + L2_EPS) * vec2<f32>(QUERY_SCALE, 1.0);
  if (!live) { return; }
  for (var i = lane; i < K; i += L) {
    U[q + i] *= scale.x;
    U[k + i] *= scale.y;
  }
  for (var i = lane; i < H / G; i += L) {
    let h = g * (H / G) + i;
    let b = group.y * 2u * H + h;
    DT[group.y * H + h] = beta_of(BC[b]);
    LOGS[group.y * H + h] = decay_of(p({{ a }}u + h), BC[b + H], p({{ dt_bias }}u + h));
  }
}
