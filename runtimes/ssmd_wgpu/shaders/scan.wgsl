// The recurrence of T tokens: h' = exp(dt A) h + dt x B^T, y = (h' C + D x) silu(gate). 16 threads share a channel's N
// states and keep them in registers; what they add up to is gathered for 16 tokens at a time.
// Mamba-1 (arXiv:2312.00752): A of every state, dt of every channel. Mamba-2 (arXiv:2405.21060): both of every head.
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}

const C = {{ channels }}u;  // inner channels
const N = {{ states }}u;
@group(0) @binding(0) var<storage, read> U: array<f32>;  // (T, u_stride): x; Mamba-2: x, B, C
@group(0) @binding(1) var<storage, read> Z: array<f32>;  // (T, z_stride): the gate; Mamba-2: dt, too
@group(0) @binding(2) var<storage, read> P: array<vec4<f32>>;  // A, dt_bias, D, see Vectors
@group(0) @binding(3) var<storage, read_write> Y: array<f32>;  // (T, C)
{% if heads is none %}
@group(0) @binding(4) var<storage, read> BC: array<f32>;  // (T, rank + 2 N): dt's input, B, C
@group(0) @binding(5) var<storage, read> DT: array<f32>;  // (T, C) before its bias
{% endif %}
{% include "control.wgsl" %}
@group(1) @binding(2) var<storage, read_write> SSM: array<f32>;  // (slots, C, N)

var<workgroup> sums: array<f32, 1024>;  // (16 tokens, 64 threads)

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let lane = li % 16u;
  let c = min(group.x * 4u + li / 16u, C - 1u);
  let live = group.x * 4u + li / 16u < C;
  let count = CTL[1];
  let state = (CTL[2] * C + c) * N;
  {% if heads is not none %}
  let h = c / {{ channels // heads }}u;
  let g = h / {{ heads // groups }}u;
  let decay = p({{ a }}u + h);
  {% else %}
  let h = c;
  {% endif %}
  let bias = p({{ dt_bias }}u + h);
  let skip = p({{ d }}u + h);
  {% for j in range(per_thread) %}
  let n{{ j }} = lane + {{ 16 * j }}u;
  let on{{ j }} = {{ "true" if 16 * (j + 1) <= states else "n%d < N" % j }};
  var s{{ j }} = 0.0;
  {% if heads is none %}
  var a{{ j }} = 0.0;
  {% endif %}
  if (on{{ j }}) {
    s{{ j }} = SSM[state + n{{ j }}];
    {% if heads is none %}
    a{{ j }} = p({{ a }}u + c * N + n{{ j }});
    {% endif %}
  }
  {% endfor %}
  for (var t0 = 0u; t0 < count; t0 += 16u) {
    for (var q = 0u; q < min(16u, count - t0); q++) {
      let t = t0 + q;
      let x = U[t * {{ u_stride }}u + c];
      {% if heads is none %}
      let dt = softplus(DT[t * C + c] + bias);
      let b = t * {{ rank + 2 * states }}u + {{ rank }}u;
      let cc = b + N;
      {% else %}
      let dt = clamp(softplus(Z[t * {{ z_stride }}u + {{ dt_offset }}u + h] + bias), {{ dt_low }}, {{ dt_high }});
      let shrink = exp(dt * decay);
      let b = t * {{ u_stride }}u + C + g * N;
      let cc = b + {{ groups * states }}u;
      {% endif %}
      let added = dt * x;
      var sum = 0.0;
      {% for j in range(per_thread) %}
      if (on{{ j }}) {
        s{{ j }} = {{ "shrink" if heads is not none else "exp(dt * a%d)" % j }} * s{{ j }} + added * {{ source }}[b + n{{ j }}];
        sum += s{{ j }} * {{ source }}[cc + n{{ j }}];
      }
      {% endfor %}
      sums[q * 64u + li] = sum;
    }
    workgroupBarrier();
    let t = t0 + lane;
    if (t < count && live) {
      var y = skip * U[t * {{ u_stride }}u + c];
      for (var i = 0u; i < 16u; i++) { y += sums[lane * 64u + (li - lane) + i]; }
      {% if gate %}
      y *= silu(Z[t * {{ z_stride }}u + {{ z_offset }}u + c]);
      {% endif %}
      Y[t * C + c] = y;
    }
    workgroupBarrier();
  }
  if (live) {
    {% for j in range(per_thread) %}
    if (on{{ j }}) { SSM[state + n{{ j }}] = s{{ j }}; }
    {% endfor %}
  }
}
