// Rows of the embedding for the tokens of this call, one of each stream or all of one; of a part of it that holds ROWS rows from FIRST on.
{% import "weights.wgsl" as weights %}
const KB = {{ blocks }}u;
const FIRST = {{ first }}u;
const ROWS = {{ rows }}u;
{{ weights.declare(format) }}
@group(0) @binding(2) var<storage, read_write> X: array<f32>;  // (T, K)
{% include "control.wgsl" %}

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) at: vec3<u32>) {
  let b = at.x;
  let t = at.y;
  if (b >= KB || t >= CTL[1]) { return; }
  let token = CTL[{{ control }}u + t];
  if (token < FIRST || token >= FIRST + ROWS) { return; }
  let row = token - FIRST;
  let w = W[row * KB + b];
  let scale = {{ scale }}{% if format == "int8" %} * S[row]{% elif format == "int4" %} * scale_S(row * KB + b){% endif %};
  let to = t * {{ columns }}u;
  var k = b * {{ values }}u;
  {% for i in range(values // 4) %}
  {
    let v = scale * {{ weights.part(format, "w", i) }};
    {% for j in range(4) %}
    if (k + {{ j }}u < {{ columns }}u) { X[to + k + {{ j }}u] = v[{{ j }}]; }
    {% endfor %}
    k += 4u;
  }
  {% endfor %}
}
