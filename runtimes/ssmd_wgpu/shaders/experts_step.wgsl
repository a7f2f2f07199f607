// A product with each row's chosen experts, whose numbers stand in a buffer. A row's sums do not depend on other rows.
// swiglu: Y[pair] = silu(gate) * up of norm(x), a chosen expert to a workgroup. add: Y[row] += the sum of
// share * W Y[pair] over the chosen experts, in their order. Experts outside this part of the weights are left to others.
{% import "weights.wgsl" as weights %}
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}
{% include "product.wgsl" %}

const CHOSEN = {{ experts.chosen }}u;
@group(0) @binding(2) var<storage, read> P: array<vec4<f32>>;  // gain (K), see Vectors
@group(0) @binding(3) var<storage, read> X: array<{{ "vec4<f32>" if columns % 4 == 0 else "f32" }}>;  // (T, K); add: (T, CHOSEN, K)
@group(0) @binding(4) var<storage, read_write> Y: array<f32>;  // (T, N); swiglu: (T, CHOSEN, N / 2)
@group(0) @binding(5) var<storage, read> EXPERTS: array<u32>;  // (T, CHOSEN)
{% if end == "add" %}
@group(0) @binding(6) var<storage, read> SHARES: array<f32>;  // (T, CHOSEN)
{% endif %}

{% include "rows.wgsl" %}
{{ weights.finished(format, "S", gain is not none, none) }}
@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  const GROUPS = {{ groups }}u;  // workgroups of an expert's rows
  let lane = li % TPR;
  let base = (group.x % GROUPS * {{ threads // threads_per_row }}u + li / TPR) * RPT;
  {% set total = "totals[%s]" if subgroups else "total(%s, first)" %}
  {% if end == "swiglu" %}
  let row = group.y;  // of x
  let pair = row * CHOSEN + group.x / GROUPS;
  let expert = EXPERTS[pair] - {{ experts.first }}u;
  if (expert >= {{ experts.here }}u) { return; }
  expert_row = expert * N;
  {% include "row_sums.wgsl" %}
  {% set rms = "scales[0]" if subgroups else "inverseSqrt(total(RPT, first) / f32(K) + %s)" % eps %}
  for (var j = lane; j < RPT / 2u; j += TPR) {
    let i = base + 2u * j;
    if (i + 2u > N) { continue; }
    let rms = {{ rms }};
    let gate = finished_S(row_of(i), {{ total % "2u * j" }}, rms, 0.0);
    let up = finished_S(row_of(i + 1u), {{ total % "2u * j + 1u" }}, rms, 0.0);
    Y[pair * (N / 2u) + i / 2u] = silu(gate) * up;
  }
  {% else %}
  for (var rank = 0u; rank < CHOSEN; rank++) {
    let row = group.y * CHOSEN + rank;  // of x: the pair
    let expert = EXPERTS[row] - {{ experts.first }}u;
    if (expert >= {{ experts.here }}u) { continue; }
    expert_row = expert * N;
    {% include "row_sums.wgsl" %}
    for (var j = lane; j < RPT; j += TPR) {
      let i = base + j;
      if (i < N) {
        let at = group.y * N + i;
        Y[at] = fma(SHARES[row], finished_S(row_of(i), {{ total % "j" }}, 1.0, 0.0), Y[at]);
      }
    }
    workgroupBarrier();  // the sums of this expert have been read
  }
  {% endif %}
}
