{# What matvec and matmul begin with: the matrix, and in which order they take its rows. #}
{% import "weights.wgsl" as weights %}
const K = {{ columns }}u;
const KB = {{ blocks }}u;
const N = {{ rows }}u;
{{ weights.declare(format) }}
{% set several = experts is defined %}
{% if several %}
var<private> expert_row: u32;  // of W, where the rows of the expert begin: N of each

{% endif %}
fn row_of(i: u32) -> u32 {  // of W, for row i of this shader
  let r = min(i, N - 1u);
{% if end == "swiglu" %}
  return {{ "expert_row + " if several }}(r % 2u) * {{ rows // 2 }}u + r / 2u;  // gate and up of a value side by side
{% else %}
  return {{ "expert_row + " if several }}r;
{% endif %}
}
