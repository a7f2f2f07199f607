// Mamba-2 by chunks (arXiv:2405.21060, section 6), 1 of 4: dt of every token and head, and the sum of dt A since its
// chunk began: the log of the decay.
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}

const H = {{ heads }}u;
const Q = {{ chunk }}u;
@group(0) @binding(0) var<storage, read> Z: array<f32>;  // (T, z_stride): dt from an offset on
@group(0) @binding(1) var<storage, read> P: array<vec4<f32>>;  // A (H), dt_bias (H), see Vectors
@group(0) @binding(2) var<storage, read_write> DT: array<f32>;  // (T, H)
@group(0) @binding(3) var<storage, read_write> LOGS: array<f32>;  // (T, H)
{% include "control.wgsl" %}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) at: vec3<u32>) {
  let h = at.x;
  if (h >= H) { return; }
  let a = p({{ a }}u + h);
  let bias = p({{ dt_bias }}u + h);
  var sum = 0.0;
  for (var t = at.y * Q; t < min(CTL[1], at.y * Q + Q); t++) {
    let dt = clamp(softplus(Z[t * {{ z_stride }}u + {{ dt_offset }}u + h] + bias), {{ dt_low }}, {{ dt_high }});
    sum += dt * a;
    DT[t * H + h] = dt;
    LOGS[t * H + h] = sum;
  }
}
