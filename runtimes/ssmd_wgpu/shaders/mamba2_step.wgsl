// Mamba-2, one token of each stream (arXiv:2405.21060): h' = exp(dt A) h + dt x B^T, y = (h' C + D x) silu(gate). A
// workgroup has {{ wide }} channels; 16 threads share a channel's N states.
// `spread`: of one stream, and x += V norm(y) with it.
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}

const C = {{ inner }}u;  // channels
const N = {{ states }}u;
@group(0) @binding(0) var<storage, read> U: array<f32>;  // (streams, u_stride): x, B, C
@group(0) @binding(1) var<storage, read> Z: array<f32>;  // (streams, z_stride): the gate, and dt from an offset on
@group(0) @binding(2) var<storage, read> P: array<vec4<f32>>;  // A, dt_bias, D (H), gain (C), see Vectors
{% if v is none %}
@group(0) @binding(3) var<storage, read_write> Y: array<f32>;  // (streams, C)
{% else %}
{% set at = 3 %}
{% set v_scaled = v_gain is not none %}
{% include "spread.wgsl" %}
{% endif %}
{% include "control.wgsl" %}
@group(1) @binding(2) var<storage, read_write> SSM: array<f32>;  // (slots, C, N)

var<workgroup> sums: array<f32, {{ threads }}>;

@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let lane = li % 16u;
  let u = group.y * {{ u_stride }}u;
  let z = group.y * {{ z_stride }}u;
  let slot = CTL[4u * group.y + 2u] * C * N;
  for (var done = 0u; done < {{ wide }}u; done += {{ threads // 16 }}u) {
    let i = done + li / 16u;  // of this workgroup's channels
    let c = min(group.x * {{ wide }}u + i, C - 1u);
    let live = i < {{ wide }}u && group.x * {{ wide }}u + i < C;
    let h = c / {{ head_dim }}u;
    let dt = clamp(softplus(Z[z + {{ dt_offset }}u + h] + p({{ dt_bias }}u + h)), {{ dt_low }}, {{ dt_high }});
    let shrink = exp(dt * p({{ a }}u + h));
    let x = U[u + c];
    let b = u + C + h / {{ heads // groups }}u * N;
    var sum = 0.0;
    {% for j in range(per_thread) %}
    {
      let n = lane + {{ 16 * j }}u;
      if ({{ "live" if 16 * (j + 1) <= states else "live && n < N" }}) {
        let s = fma(shrink, SSM[slot + c * N + n], dt * x * U[b + n]);
        SSM[slot + c * N + n] = s;
        sum = fma(s, U[b + {{ groups * states }}u + n], sum);
      }
    }
    {% endfor %}
    sums[li] = sum;
    workgroupBarrier();
    if (lane == 0u && i < {{ wide }}u) {
      var y = 0.0;
      for (var k = 0u; k < 16u; k++) { y += sums[li + k]; }
      y = fma(p({{ d }}u + h), x, y);
      {% if gate %}
      y *= silu(Z[z + c]);
      {% endif %}
      {% if v is none %}
      if (live) { Y[group.y * C + c] = y; }
      {% else %}
      slice[i / 4u][i % 4u] = select(0.0, y, live);
      {% endif %}
    }
    workgroupBarrier();
  }
  {% if v is not none %}
  {% if v_gain is not none %}
  if (li == 0u) {
    var q = 0.0;
    for (var k = 0u; k < {{ wide // 4 }}u; k++) { q += dot(slice[k], slice[k]); }
    SUMS[SLICES * QUADS + group.x] = vec4<f32>(q);
  }
  workgroupBarrier();
  for (var k = li; k < {{ wide // 4 }}u; k += {{ threads }}u) {
    slice[k] *= P[min({{ v_gain // 4 }}u + group.x * {{ wide // 4 }}u + k, arrayLength(&P) - 1u)];
  }
  workgroupBarrier();
  {% endif %}
  spread(group.x, li);
  if (arrives_last(li, 0u, SLICES)) { finish(li); }
  {% endif %}
}
