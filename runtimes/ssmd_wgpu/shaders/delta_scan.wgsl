// Gated DeltaNet over T tokens, 2 of 2: token by token S' = d S + u k^T with u = beta (v - d S k), y = S' q, of a head's state
// S (D, K). L threads share a row of S and keep it in registers; what gives y is summed up for 16 tokens at a time.
{% import "delta.wgsl" as delta with context %}
{{ delta.declare() }}
const L = {{ lanes }}u;
@group(0) @binding(0) var<storage, read> U: array<{{ unit }}>;  // (T, u_stride): q (G, K), k (G, K), of length 1; v (H, D)
@group(0) @binding(1) var<storage, read> DT: array<f32>;  // (T, H): beta
@group(0) @binding(2) var<storage, read> LOGS: array<f32>;  // (T, H): the decay
@group(0) @binding(3) var<storage, read_write> Y: array<f32>;  // (T, H, D)
{% include "control.wgsl" %}
@group(1) @binding(2) var<storage, read_write> SSM: array<{{ unit }}>;  // (slots, H, D, K)

var<workgroup> parts: array<f32, 128>;  // S k of each thread, for a token and for the one before
var<workgroup> sums: array<f32, 1024>;  // (16 tokens, 64 threads): S' q

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let lane = li % L;
  let first = li - lane;
  let h = group.x / {{ across }}u;
  let row = group.x % {{ across }}u * {{ 64 // lanes }}u + li / L;
  let live = row < D;
  let d = min(row, D - 1u);
  let count = CTL[1];
  let state = ((CTL[2] * H + h) * D + d) * UNITS + lane;
  {% for j in range(per_thread) %}
  let on{{ j }} = {{ "true" if lanes * (j + 1) <= units else "lane + %du < UNITS" % (lanes * j) }};
  var s{{ j }} = {{ unit }}();
  if (on{{ j }}) { s{{ j }} = SSM[state + {{ lanes * j }}u]; }
  {% endfor %}
  for (var t0 = 0u; t0 < count; t0 += 16u) {
    let tokens = min(16u, count - t0);
    for (var i = 0u; i < tokens; i++) {
      let t = t0 + i;
      let q = (t * {{ u_stride }}u + h / (H / G) * K){{ " / 4u" if quads }} + lane;
      let k = q + G * UNITS;
      let to = i % 2u * 64u;
      var by_key = {{ unit }}();
      {% for j in range(per_thread) %}
      var k{{ j }} = {{ unit }}();
      if (on{{ j }}) { k{{ j }} = U[k + {{ lanes * j }}u]; }
      by_key = fma(s{{ j }}, k{{ j }}, by_key);
      {% endfor %}
      parts[to + li] = {{ delta.total("by_key") }};
      workgroupBarrier();  // one for a token: the token before last was read before the last one's
      var sum = 0.0;
      for (var l = 0u; l < L; l++) { sum += parts[to + first + l]; }
      let v = t * {{ u_stride }}u + 2u * G * K + h * D + d;
      let decay = LOGS[t * H + h];
      let added = DT[t * H + h] * fma(-decay, sum, {{ delta.value("U", "v") }});
      var by_query = {{ unit }}();
      {% for j in range(per_thread) %}
      if (on{{ j }}) {
        s{{ j }} = fma({{ unit }}(added), k{{ j }}, decay * s{{ j }});
        by_query = fma(s{{ j }}, U[q + {{ lanes * j }}u], by_query);
      }
      {% endfor %}
      sums[i * 64u + li] = {{ delta.total("by_query") }};
    }
    workgroupBarrier();
    for (var i = lane; i < tokens; i += L) {
      var y = 0.0;
      for (var l = 0u; l < L; l++) { y += sums[i * 64u + first + l]; }
      if (live) { Y[((t0 + i) * H + h) * D + d] = y; }
    }
    workgroupBarrier();
  }
  {% for j in range(per_thread) %}
  if (live && on{{ j }}) { SSM[state + {{ lanes * j }}u] = s{{ j }}; }
  {% endfor %}
}
