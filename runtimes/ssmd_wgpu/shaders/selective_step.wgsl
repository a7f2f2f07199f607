// Mamba-1, one token of each stream (arXiv:2312.00752, algorithm 2): the product that gives dt, the norms of dt's input, B and C where
// the family has them, the recurrence and the gate. 16 threads share a channel's N states.
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}

const C = {{ channels }}u;
const N = {{ states }}u;
const RANK = {{ rank }}u;
@group(0) @binding(0) var<storage, read> W: array<{{ "f32" if format == "f32" else "u32" }}>;  // (C, padded rank)
@group(0) @binding(1) var<storage, read> BC: array<f32>;  // (streams, rank + 2 N): dt's input, B, C
@group(0) @binding(2) var<storage, read> P: array<vec4<f32>>;  // A (C, N), dt_bias (C), D (C), see Vectors
@group(0) @binding(3) var<storage, read> U: array<f32>;  // (streams, C)
@group(0) @binding(4) var<storage, read> Z: array<f32>;  // (streams, 2 C): the gate from C on
@group(0) @binding(5) var<storage, read_write> Y: array<f32>;  // (streams, C)
@group(1) @binding(2) var<storage, read_write> SSM: array<f32>;  // (slots, C, N)
{% include "control.wgsl" %}

var<workgroup> sums: array<f32, 64>;
var<workgroup> squares: array<f32, 64>;

fn weight(c: u32, k: u32) -> f32 {
{% if format == "f32" %}
  return W[c * {{ blocks * 4 }}u + k];
{% else %}
  return unpack2x16float(W[c * {{ blocks * 4 }}u + k / 2u])[k % 2u];
{% endif %}
}
{% if mixer_eps is not none %}

fn rms(first: u32, count: u32) -> f32 {
  var sum = 0.0;
  for (var i = 0u; i < count; i++) { sum += BC[first + i] * BC[first + i]; }
  return inverseSqrt(sum / f32(count) + {{ mixer_eps }});
}
{% endif %}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let lane = li % 16u;
  let first = li - lane;
  let c = min(group.x * 4u + li / 16u, C - 1u);
  let live = group.x * 4u + li / 16u < C;
  let bc = group.y * (RANK + 2u * N);
  let state = (CTL[4u * group.y + 2u] * C + c) * N;
  var sum = 0.0;
  var square = 0.0;
  for (var k = lane; k < RANK; k += 16u) {
    sum += weight(c, k) * BC[bc + k];
    square += BC[bc + k] * BC[bc + k];
  }
  sums[li] = sum;
  squares[li] = square;
  workgroupBarrier();
  sum = 0.0;
  square = 0.0;
  for (var i = 0u; i < 16u; i++) {
    sum += sums[first + i];
    square += squares[first + i];
  }
  workgroupBarrier();
  {% if mixer_eps is not none %}
  sum *= inverseSqrt(square / f32(RANK) + {{ mixer_eps }});
  let rms_b = rms(bc + RANK, N);
  let rms_c = rms(bc + RANK + N, N);
  {% else %}
  let rms_b = 1.0;
  let rms_c = 1.0;
  {% endif %}
  let dt = softplus(sum + p({{ dt_bias }}u + c));
  let x = U[group.y * C + c];
  var y = 0.0;
  for (var n = lane; n < N; n += 16u) {
    let s = exp(dt * p({{ a }}u + c * N + n)) * SSM[state + n] + dt * x * rms_b * BC[bc + RANK + n];
    if (live) { SSM[state + n] = s; }
    y += s * rms_c * BC[bc + RANK + N + n];
  }
  sums[li] = y;
  workgroupBarrier();
  if (lane == 0u && live) {
    y = p({{ d }}u + c) * x;
    for (var i = 0u; i < 16u; i++) { y += sums[first + i]; }
    Y[group.y * C + c] = y * silu(Z[(2u * group.y + 1u) * C + c]);
  }
}
