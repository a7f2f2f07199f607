// RMSNorm of parts of each token's row, in place: part j of it begins at `from0` + j * K. The weight is of the whole
// (Mamba-2's norm, in groups) or `shared` by all parts (gated DeltaNet's heads), or there is none (FalconMamba's norms of
// dt's input, B and C).
{% include "numbers.wgsl" %}

const K = {{ columns }}u;  // of a part
@group(0) @binding(0) var<storage, read_write> Y: array<f32>;  // (T, stride)
{% if gain is not none %}
@group(0) @binding(1) var<storage, read> P: array<vec4<f32>>;  // gain of all parts or of one, see Vectors
{% endif %}
{% if gate is not none %}
@group(0) @binding(2) var<storage, read> Z: array<f32>;  // (T, gate_stride), the gate of all parts at its start
{% endif %}

var<workgroup> sums: array<f32, 64>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let from0 = group.y * {{ stride }}u + {{ offset }}u + group.x * K;
  var sum = 0.0;
  for (var k = li; k < K; k += 64u) { sum += Y[from0 + k] * Y[from0 + k]; }
  sums[li] = sum;
  workgroupBarrier();
  sum = 0.0;
  for (var i = 0u; i < 64u; i++) { sum += sums[i]; }
  let rms = inverseSqrt(sum / f32(K) + {{ eps }});
  for (var k = li; k < K; k += 64u) {
    var y = Y[from0 + k] * rms;
    let i = group.x * K + k;
    {% if gain is not none %}
    {% set at = "k" if shared else "i" %}
    y *= P[({{ gain }}u + {{ at }}) / 4u][({{ gain }}u + {{ at }}) % 4u];
    {% endif %}
    {% if gate is not none %}
    y *= silu(Z[group.y * {{ gate }}u + i]);
    {% endif %}
    Y[from0 + k] = y;
  }
}
