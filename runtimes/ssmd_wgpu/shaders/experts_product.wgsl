// A product of rows of x with the matrices of their chosen experts, which stand one after another in W. A row's sums are
// those of matvec.wgsl, whatever rows are beside it. Experts that are in another part of the weights are left to others.
// A decode step: an expert of a row to a workgroup, and with `add` all of them one after another.
// `tiled`, a prefill: a tile of STREAMS pairs of one expert, as experts_group.wgsl groups them.
// swiglu: Y[pair] = silu(gate) * up of norm(x). store: Y[pair] = W x. add: Y[row] += the sum of share * W x.
{% import "weights.wgsl" as weights %}
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}
{% include "product.wgsl" %}

const CHOSEN = {{ experts.chosen }}u;
@group(0) @binding(2) var<storage, read> P: array<vec4<f32>>;  // gain (K), see Vectors
@group(0) @binding(3) var<storage, read> X: array<{{ "vec4<f32>" if columns % 4 == 0 else "f32" }}>;  // (T, K), or of pairs
@group(0) @binding(4) var<storage, read_write> Y: array<f32>;  // (T, CHOSEN, N), swiglu: (T, CHOSEN, N / 2), add: (T, N)
{% if tiled %}
@group(0) @binding(5) var<storage, read> GROUPS: array<u32>;  // see Groups in experts.py
{% else %}
@group(0) @binding(5) var<storage, read> EXPERTS: array<u32>;  // (T, CHOSEN)
{% endif %}
{% if end == "add" %}
@group(0) @binding(6) var<storage, read> SHARES: array<f32>;  // (T, CHOSEN)
{% endif %}

{% include "rows.wgsl" %}
{{ weights.finished(format, "S", gain is not none, none) }}
@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  const ACROSS = {{ across }}u;  // workgroups of an expert's rows
  let lane = li % TPR;
  let base = (group.x % ACROSS * {{ threads // threads_per_row }}u + li / TPR) * RPT;
  {% set rows_apart = true %}
  {% set total = "totals[%s]" if subgroups else "total(%s, first)" %}
  {% set rms = "scales[stream]" if subgroups else "inverseSqrt(total(RPT * STREAMS + stream, first) / f32(K) + %s)" % eps %}
  {% if end == "add" %}
  for (var rank = 0u; rank < CHOSEN; rank++) {
    let row0 = group.y * CHOSEN + rank;
    let expert = EXPERTS[row0] - {{ experts.first }}u;
    if (expert >= {{ experts.here }}u) { continue; }
    expert_row = expert * N;
    {% include "row_sums.wgsl" %}
    for (var j = lane; j < RPT; j += TPR) {
      let i = base + j;
      if (i < N) {
        let at = group.y * N + i;
        Y[at] = fma(SHARES[row0], finished_S(row_of(i), {{ total % "j" }}, 1.0, 0.0), Y[at]);
      }
    }
    workgroupBarrier();  // the sums of this expert have been read
  }
  {% else %}
  {% if tiled %}
  const TILES = {{ experts.tiles_at }}u;
  if (group.y >= GROUPS[TILES - 1u]) { return; }
  let number = GROUPS[TILES + 2u * group.y];
  let slot = {{ experts.places_at }}u + GROUPS[TILES + 2u * group.y + 1u];
  let last = {{ experts.places_at }}u + GROUPS[number + 1u] - 1u;  // of the expert's pairs
  {% else %}
  let pair = group.y * CHOSEN + group.x / ACROSS;
  let number = EXPERTS[pair];
  {% endif %}
  let expert = number - {{ experts.first }}u;
  if (expert >= {{ experts.here }}u) { return; }
  expert_row = expert * N;
  {% for c in range(streams) %}
  let row{{ c }} = {{ "GROUPS[min(slot + %du, last)]" % c if tiled else "pair" }}{{ " / CHOSEN" if end == "swiglu" }};
  {% endfor %}
  {% include "row_sums.wgsl" %}
  {% set wide = 2 if end == "swiglu" else 1 %}
  for (var j = lane; j < RPT / {{ wide }}u * STREAMS; j += TPR) {
    let stream = j % STREAMS;
    let at = j / STREAMS * {{ wide }}u;  // of this thread's rows
    let i = base + at;
    if (i + {{ wide }}u > N{{ " || slot + stream > last" if tiled }}) { continue; }
    {% if tiled %}
    let pair = GROUPS[slot + stream];
    {% endif %}
    let rms = {{ rms if gain is not none else "1.0" }};
    {% if end == "swiglu" %}
    let gate = finished_S(row_of(i), {{ total % "at * STREAMS + stream" }}, rms, 0.0);
    let up = finished_S(row_of(i + 1u), {{ total % "(at + 1u) * STREAMS + stream" }}, rms, 0.0);
    Y[pair * (N / 2u) + i / 2u] = silu(gate) * up;
    {% else %}
    Y[pair * N + i] = finished_S(row_of(i), {{ total % "at * STREAMS + stream" }}, rms, 0.0);
    {% endif %}
  }
  {% endif %}
}
