// A whole MLP for one token: x += V act(W norm(x)), by workgroups that have a slice of the intermediate values each.
{% import "weights.wgsl" as weights %}
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}
{% include "product.wgsl" %}
@group(0) @binding(2) var<storage, read> P: array<vec4<f32>>;  // gain (K), biases, see Vectors
{% set at = 3 %}
{% set v_scaled = false %}
{% include "spread.wgsl" %}

{% include "rows.wgsl" %}
{{ weights.finished(format, "S", gain is not none, bias) }}
{% set pair = 2 if end == "swiglu" else 1 %}
{% set wide = v_unit * v["values"] %}
{% set together = threads // threads_per_row * rows_per_thread %}
@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) li: u32) {
  let lane = li % TPR;
  let row = 0u;
  for (var done = 0u; done < {{ pair * wide }}u; done += {{ together }}u) {
    let mine = done + li / TPR * RPT;  // of the slice's rows of W, this thread's first
    let base = group.x * {{ pair * wide }}u + mine;
    {% include "row_sums.wgsl" %}
    {% set total = "totals[%s]" if subgroups else "total(%s, first)" %}
    {% set rms = "scales[0]" if subgroups else "inverseSqrt(total(RPT, first) / f32(K) + %s)" % eps %}
    for (var j = lane; j < RPT / {{ pair }}u; j += TPR) {
      let i = base + {{ pair }}u * j;
      let h = (mine + {{ pair }}u * j) / {{ pair }}u;  // of the slice
      if (h >= {{ wide }}u) { break; }
      var v = 0.0;
      if (i < N) {
        let rms = {{ rms }};
        {% if end == "swiglu" %}
        let gate = finished_S(row_of(i), {{ total % "2u * j" }}, rms, 0.0);
        let up = finished_S(row_of(i + 1u), {{ total % "2u * j + 1u" }}, rms, 0.0);
        v = silu(gate) * up;
        {% else %}
        let a = max(finished_S(row_of(i), {{ total % "j" }}, rms, 0.0), 0.0);
        v = a * a;
        {% endif %}
      }
      slice[h / 4u][h % 4u] = v;
    }
    workgroupBarrier();
  }
  spread(group.x, li);
  if (arrives_last(li, 0u, SLICES)) { finish(li); }
}
