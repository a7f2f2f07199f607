// Gated DeltaNet, one token of each stream (arXiv:2412.06464): S' = d S + u k^T with u = beta (v - d S k), y = S' q, of a head's
// state S (D, K); then norm(y) w silu(gate), where all heads share w. A workgroup has a head. L threads share a row of S, which
// is read once: both of its sums are of the state before, as y = d (S q) + u (k q).
// `spread`: of one stream, and x += V y with it.
{% import "delta.wgsl" as delta with context %}
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}

{{ delta.declare() }}
const L = {{ lanes }}u;
@group(0) @binding(0) var<storage, read> U: array<f32>;  // (streams, u_stride): q (G, K), k (G, K), v (H, D)
@group(0) @binding(1) var<storage, read> Z: array<f32>;  // (streams, z_stride): the gate (H, D) at its start
@group(0) @binding(2) var<storage, read> P: array<vec4<f32>>;  // A (H), dt_bias (H), w (D), see Vectors
@group(0) @binding(3) var<storage, read> BC: array<f32>;  // (streams, 2 H): b, a
{% if v is none %}
@group(0) @binding(4) var<storage, read_write> Y: array<f32>;  // (streams, H, D)
{% else %}
{% set at = 4 %}
{% set threads = 256 %}
{% set v_scaled = false %}
{% include "spread.wgsl" %}
{% endif %}
{% include "control.wgsl" %}
@group(1) @binding(2) var<storage, read_write> SSM: array<{{ unit }}>;  // (slots, H, D, K)

var<workgroup> query: array<{{ unit }}, UNITS>;
var<workgroup> key: array<{{ unit }}, UNITS>;
var<workgroup> parts: array<vec2<f32>, {{ 256 * each }}>;  // S k and S q, of each thread's rows
var<workgroup> out: array<f32, D>;
var<workgroup> sums: array<vec3<f32>, 256>;

{{ delta.declare_gates() }}
fn summed(li: u32, x: vec3<f32>) -> vec3<f32> {  // over all threads
  sums[li] = x;
  workgroupBarrier();
  var sum = vec3<f32>();
  if (li < 16u) {
    for (var i = 0u; i < 16u; i++) { sum += sums[16u * li + i]; }
  }
  workgroupBarrier();
  if (li < 16u) { sums[li] = sum; }
  workgroupBarrier();
  sum = vec3<f32>();
  for (var i = 0u; i < 16u; i++) { sum += sums[i]; }
  return sum;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let h = group.x;
  let lane = li % L;
  let first = li - lane;
  let u = group.y * {{ u_stride }}u;
  let g = u + h / (H / G) * K;
  var q = 0.0;
  var k = 0.0;
  if (li < K) {
    q = U[g + li];
    k = U[g + G * K + li];
  }
  let squares = summed(li, vec3<f32>(q * q, k * k, q * k));
  let q_scale = inverseSqrt(squares.x + L2_EPS) * QUERY_SCALE;
  let k_scale = inverseSqrt(squares.y + L2_EPS);
  if (li < K) {
    {{ delta.value("query", "li") }} = q * q_scale;
    {{ delta.value("key", "li") }} = k * k_scale;
  }
  let kq = squares.z * q_scale * k_scale;
  let b = group.y * 2u * H + h;
  let decay = decay_of(p({{ a }}u + h), BC[b + H], p({{ dt_bias }}u + h));
  let beta = beta_of(BC[b]);
  let state = (CTL[4u * group.y + 2u] * H + h) * D * UNITS;
  workgroupBarrier();
  for (var done = 0u; done < D; done += {{ 256 // lanes * each }}u) {
    {% for e in range(each) %}
    let d{{ e }} = done + {{ 256 // lanes * e }}u + li / L;
    let at{{ e }} = state + min(d{{ e }}, D - 1u) * UNITS + lane;
    {% endfor %}
    {% for j in range(per_thread) %}
    {% for e in range(each) %}
    var s{{ e }}_{{ j }} = SSM[at{{ e }} + {{ lanes * j }}u];
    {% endfor %}
    {% if lanes * (j + 1) > units %}
    if (lane + {{ lanes * j }}u >= UNITS) {
      {% for e in range(each) %}
      s{{ e }}_{{ j }} = {{ unit }}();
      {% endfor %}
    }
    {% endif %}
    {% endfor %}
    {% for e in range(each) %}
    {
      var by_key = {{ unit }}();
      var by_query = {{ unit }}();
      {% for j in range(per_thread) %}
      {
        let n = min(lane + {{ lanes * j }}u, UNITS - 1u);
        by_key = fma(s{{ e }}_{{ j }}, key[n], by_key);
        by_query = fma(s{{ e }}_{{ j }}, query[n], by_query);
      }
      {% endfor %}
      parts[{{ 256 * e }}u + li] = vec2<f32>({{ delta.total("by_key") }}, {{ delta.total("by_query") }});
    }
    {% endfor %}
    workgroupBarrier();
    {% for e in range(each) %}
    if (d{{ e }} < D) {
      var sum = vec2<f32>();
      for (var i = 0u; i < L; i++) { sum += parts[{{ 256 * e }}u + first + i]; }
      let added = beta * fma(-decay, sum.x, U[u + 2u * G * K + h * D + d{{ e }}]);
      {% for j in range(per_thread) %}
      {{ "{" if lanes * (j + 1) <= units else "if (lane + %du < UNITS) {" % (lanes * j) }}
        SSM[at{{ e }} + {{ lanes * j }}u] = fma({{ unit }}(added), key[lane + {{ lanes * j }}u], decay * s{{ e }}_{{ j }});
      }
      {% endfor %}
      if (lane == 0u) { out[d{{ e }}] = fma(decay, sum.y, added * kq); }
    }
    {% endfor %}
    workgroupBarrier();
  }
  var y = 0.0;
  if (li < D) { y = out[li]; }
  let rms = inverseSqrt(summed(li, vec3<f32>(y * y)).x / f32(D) + {{ eps }});
  if (li < D) {
    y = y * rms * p({{ gated_norm }}u + li) * silu(Z[group.y * {{ z_stride }}u + h * D + li]);
    {{ "Y[(group.y * H + h) * D + li]" if v is none else "slice[li / 4u][li % 4u]" }} = y;
  }
  {% if v is not none %}
  workgroupBarrier();
  spread(h, li);
  if (arrives_last(li, 0u, SLICES)) { finish(li); }
  {% endif %}
}
