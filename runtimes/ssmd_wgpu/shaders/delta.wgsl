{# Gated DeltaNet's sizes. H heads of D values (the plan's V); G key heads of K values, each of H / G heads after one another.
   A unit is what a thread reads at once: four values where they divide rows of the state and of U, else one. #}
{% macro declare() %}
const H = {{ heads }}u;
const G = {{ key_heads }}u;
const K = {{ key_dim }}u;
const D = {{ value_dim }}u;
const UNITS = {{ units }}u;  // of a key
const L2_EPS = 1e-6;  // beside the sum of squares, whatever the model's epsilon is
const QUERY_SCALE = {{ query_scale }};  // 1 / sqrt(K)
{% endmacro %}
{# Of a head: how much of its state stays (`rate`: A), and how much of a value is written. #}
{% macro declare_gates() %}
fn decay_of(rate: f32, a: f32, bias: f32) -> f32 {
  return exp(rate * softplus(a + bias));
}

fn beta_of(b: f32) -> f32 {
  return 1.0 / (1.0 + exp(-b));
}
{% endmacro %}
{# Value i of an array of units. #}
{% macro value(array, i) %}
{{ "%s[%s / 4u][%s %% 4u]" % (array, i, i) if quads else "%s[%s]" % (array, i) }}
{%- endmacro %}
{# The sum of a unit. #}
{% macro total(x) %}
{{ "(%s.x + %s.y) + (%s.z + %s.w)" % (x, x, x, x) if quads else x }}
{%- endmacro %}
