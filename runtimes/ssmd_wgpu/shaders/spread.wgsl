{# A product x += V v spread over workgroups, each of which has UNIT blocks of v: what its columns of V give goes to SUMS,
   and the workgroup that comes last adds up, in the order of matvec.wgsl.
   `v`: the matrix; `v_unit`, `v_slices`, `v_bias`, `v_scaled` (by 1 / rms of v); at: the first binding. #}
{% import "weights.wgsl" as weights %}
const V_ROWS = {{ v.rows }}u;
const V_BLOCKS = {{ v.blocks }}u;
const UNIT = {{ v_unit }}u;
const SLICES = {{ v_slices }}u;
const QUADS = {{ (v.rows + 3) // 4 }}u;
{{ weights.declare(v.format, "V", "T", at) }}
@group(0) @binding({{ at + 2 }}) var<storage, read_write> X: array<{{ "vec4<f32>" if v.rows % 4 == 0 else "f32" }}>;  // (V_ROWS): the residual stream
@coherent @group(0) @binding({{ at + 3 }}) var<storage, read_write> SUMS: array<vec4<f32>>;  // (SLICES, V_ROWS), then squares (SLICES)
{% set count_at = at + 4 %}
{% include "arrive.wgsl" %}
var<workgroup> slice: array<vec4<f32>, {{ v_unit * v["values"] // 4 }}>;  // of v, this workgroup's

{{ weights.finished(v.format, "T", v_scaled, v_bias) }}
fn spread(u: u32, li: u32) {  // four rows of V a thread
  for (var i = li; i < QUADS; i += {{ threads }}u) {
    var sums = vec4<f32>();
    for (var b = u * UNIT; b < min(u * UNIT + UNIT, V_BLOCKS); b++) {
      let k = (b - u * UNIT) * {{ v["values"] // 4 }}u;
      {% for e in range(4) %}
      let r{{ e }} = min(4u * i + {{ e }}u, V_ROWS - 1u) * V_BLOCKS + b;
      let w{{ e }} = V[r{{ e }}];
      var s{{ e }} = 0.0;
      {% endfor %}
      {% for j in range(v["values"] // 4) %}
      {
        let x = slice[k + {{ j }}u];
        {% for e in range(4) %}
        {{ weights.added(v.format, "s%d" % e, weights.part(v.format, "w%d" % e, j), "x") }}
        {% endfor %}
      }
      {% endfor %}
      {% for e in range(4) %}
      sums[{{ e }}] = {{ "fma(s%d, scale_T(r%d), sums[%d])" % (e, e, e) if v.format == "int4" else "sums[%d] + s%d" % (e, e) }};
      {% endfor %}
    }
    SUMS[u * QUADS + i] = sums;
  }
}
{# The sum over lane l of a matvec, and over lanes l, l + step, ... #}
{% macro lane(l) %}
{%- for s in range(l, v_slices, v.threads_per_row) %}({% endfor -%}
vec4<f32>(){% for s in range(l, v_slices, v.threads_per_row) %} + SUMS[at + {{ s }}u * step]){% endfor %}
{% endmacro %}
{% macro tree(l, step) %}
{%- if step == v.threads_per_row -%} {{ lane(l) }}
{%- else -%} ({{ tree(l, 2 * step) }} + {{ tree(l + step, 2 * step) }})
{%- endif -%}
{% endmacro %}

fn over_slices(at: u32, step: u32) -> vec4<f32> {
{% if v.subgroups %}
  return {{ tree(0, 1) }};
{% else %}
  var sum = vec4<f32>();
  {% for l in range([v.threads_per_row, v_slices] | min) %}
  sum += {{ lane(l) }};
  {% endfor %}
  return sum;
{% endif %}
}

fn finish(li: u32) {
  {% if v_scaled %}
  let rms = inverseSqrt(over_slices(SLICES * QUADS, 1u).x / f32({{ v.columns }}) + {{ v_eps }});
  {% else %}
  let rms = 1.0;
  {% endif %}
  for (var i = li; i < QUADS; i += {{ threads }}u) {
    let sums = over_slices(i, QUADS);
    let r = 4u * i;
    {% if v.rows % 4 == 0 %}
    let x = X[i];
    X[i] = vec4<f32>(
      finished_T(r, sums.x, rms, x.x),
      finished_T(r + 1u, sums.y, rms, x.y),
      finished_T(r + 2u, sums.z, rms, x.z),
      finished_T(r + 3u, sums.w, rms, x.w),
    );
    {% else %}
    for (var e = 0u; e < 4u; e++) {
      if (r + e < V_ROWS) { X[r + e] = finished_T(r + e, sums[e], rms, X[r + e]); }
    }
    {% endif %}
  }
}
