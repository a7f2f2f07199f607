// Gated DeltaNet over T tokens, 2 of 2: token by token S' = d S + u k^T with u = beta (v - d S k), y = S' q, of a head's state
// S (D, K). L threads share rows of S and keep them in registers; what gives y is summed up for 8 tokens at a time.
{% import "delta.wgsl" as delta with context %}
{{ delta.declare() }}
const L = {{ lanes }}u;
@group(0) @binding(0) var<storage, read> U: array<{{ unit }}>;  // (T, u_stride): q (G, K), k (G, K), of length 1; v (H, D)
@group(0) @binding(1) var<storage, read> DT: array<f32>;  // (T, H): beta
@group(0) @binding(2) var<storage, read> LOGS: array<f32>;  // (T, H): the decay
@group(0) @binding(3) var<storage, read_write> Y: array<f32>;  // (T, H, D)
{% include "control.wgsl" %}
@group(1) @binding(2) var<storage, read_write> SSM: array<{{ unit }}>;  // (slots, H, D, K)

{% set together = 64 // lanes * each %}
var<workgroup> parts: array<f32, {{ 128 * each }}>;  // S k of each thread's rows, for a token and for the one before
var<workgroup> sums: array<f32, {{ 512 * each }}>;  // (8 tokens, rows, 64 threads): S' q

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let lane = li % L;
  let first = li - lane;
  let h = group.x / {{ across }}u;
  let row = group.x % {{ across }}u * {{ together }}u + li / L;
  let count = CTL[1];
  let state = (CTL[2] * H + h) * D * UNITS + lane;
  {% for j in range(per_thread) %}
  let on{{ j }} = {{ "true" if lanes * (j + 1) <= units else "lane + %du < UNITS" % (lanes * j) }};
  {% endfor %}
  {% for e in range(each) %}
  let d{{ e }} = row + {{ 64 // lanes * e }}u;
  {% for j in range(per_thread) %}
  var s{{ e }}_{{ j }} = {{ unit }}();
  if (d{{ e }} < D && on{{ j }}) { s{{ e }}_{{ j }} = SSM[state + d{{ e }} * UNITS + {{ lanes * j }}u]; }
  {% endfor %}
  {% endfor %}
  for (var t0 = 0u; t0 < count; t0 += 8u) {
    let tokens = min(8u, count - t0);
    for (var i = 0u; i < tokens; i++) {
      let t = t0 + i;
      let q = (t * {{ u_stride }}u + h / (H / G) * K){{ " / 4u" if quads }} + lane;
      let k = q + G * UNITS;
      let v = t * {{ u_stride }}u + 2u * G * K + h * D;
      let to = i % 2u * {{ 64 * each }}u;
      let decay = LOGS[t * H + h];
      let beta = DT[t * H + h];
      {% for j in range(per_thread) %}
      var k{{ j }} = {{ unit }}();
      var q{{ j }} = {{ unit }}();
      if (on{{ j }}) {
        k{{ j }} = U[k + {{ lanes * j }}u];
        q{{ j }} = U[q + {{ lanes * j }}u];
      }
      {% endfor %}
      {% for e in range(each) %}
      {
        var by_key = {{ unit }}();
        {% for j in range(per_thread) %}
        by_key = fma(s{{ e }}_{{ j }}, k{{ j }}, by_key);
        {% endfor %}
        parts[to + {{ 64 * e }}u + li] = {{ delta.total("by_key") }};
      }
      {% endfor %}
      workgroupBarrier();  // one for a token: the token before last was read before the last one's
      {% for e in range(each) %}
      {
        var sum = 0.0;
        for (var l = 0u; l < L; l++) { sum += parts[to + {{ 64 * e }}u + first + l]; }
        let at = v + min(d{{ e }}, D - 1u);
        let added = beta * fma(-decay, sum, {{ delta.value("U", "at") }});
        var by_query = {{ unit }}();
        {% for j in range(per_thread) %}
        s{{ e }}_{{ j }} = fma({{ unit }}(added), k{{ j }}, decay * s{{ e }}_{{ j }});
        by_query = fma(s{{ e }}_{{ j }}, q{{ j }}, by_query);
        {% endfor %}
        sums[i * {{ 64 * each }}u + {{ 64 * e }}u + li] = {{ delta.total("by_query") }};
      }
      {% endfor %}
    }
    workgroupBarrier();
    for (var i = lane; i < tokens; i += L) {
      {% for e in range(each) %}
      if (d{{ e }} < D) {
        var y = 0.0;
        for (var l = 0u; l < L; l++) { y += sums[i * {{ 64 * each }}u + {{ 64 * e }}u + first + l]; }
        Y[((t0 + i) * H + h) * D + d{{ e }}] = y;
      }
      {% endfor %}
    }
    workgroupBarrier();
  }
  {% for e in range(each) %}
  {% for j in range(per_thread) %}
  if (d{{ e }} < D && on{{ j }}) { SSM[state + d{{ e }} * UNITS + {{ lanes * j }}u] = s{{ e }}_{{ j }}; }
  {% endfor %}
  {% endfor %}
}
