// Depthwise causal convolution over T tokens, and the state that they leave: the last values before it, oldest first.
// `one`: over a token of each stream.
// `gated` (LFM2): the input is B * x and the output is multiplied with the gate, all three from one row.
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}

const C = {{ channels }}u;
const PAST = {{ width - 1 }}u;
@group(0) @binding(0) var<storage, read> X: array<f32>;  // (T, stride), the input from an offset on; gated: B, gate, x
@group(0) @binding(1) var<storage, read> P: array<vec4<f32>>;  // weight (C, width), bias (C), see Vectors
@group(0) @binding(2) var<storage, read_write> U: array<f32>;  // (T, C)
{% include "control.wgsl" %}
@group(1) @binding(1) var<storage, read_write> CONV: array<f32>;  // (slots, C, width - 1)

fn input(c: u32, t: u32) -> f32 {
  let at = t * {{ stride }}u + {{ offset }}u + c;
  return X[at]{% if gated %} * X[at + 2u * C]{% endif %};
}

fn value(at: u32, c: u32, row: u32, s: u32) -> f32 {  // s counts from the oldest value of the state on, which is at `at`
  if (s < PAST) { return CONV[at + s]; }
  return input(c, row + s - PAST);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let c = group.x * 32u + li % 32u;
  let lane = li / 32u;
  {% if one %}
  let row = group.y;  // of x, the first
  let count = 1u;
  {% else %}
  let row = 0u;
  let count = CTL[1];
  {% endif %}
  let at = (CTL[4u * row + 2u] * C + c) * PAST;
  var kept = 0.0;
  if (c < C) {
    for (var t = lane; t < count; t += 8u) {
      var sum = {{ "p(%du + c)" % conv_bias if conv_bias is not none else "0.0" }};
      for (var k = 0u; k < {{ width }}u; k++) { sum += p({{ conv }}u + c * {{ width }}u + k) * value(at, c, row, t + k); }
      {% if gated %}
      U[(row + t) * C + c] = sum * X[(row + t) * {{ stride }}u + C + c];
      {% else %}
      U[(row + t) * C + c] = silu(sum);
      {% endif %}
    }
    if (lane < PAST) { kept = value(at, c, row, count + lane); }
  }
  workgroupBarrier();  // all of a channel's threads are here: nobody reads the old state any more
  storageBarrier();
  if (c < C && lane < PAST) { CONV[at + lane] = kept; }
}
