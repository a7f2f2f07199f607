{# What computes sums over rows of W: TPR of a workgroup's threads share RPT rows. #}
const TPR = {{ threads_per_row }}u;
const RPT = {{ rows_per_thread }}u;
const STREAMS = {{ streams }}u;
{% if not subgroups %}
var<workgroup> sums: array<f32, {{ threads * streams * (rows_per_thread + (1 if gain is not none else 0)) }}>;

{% endif %}
fn loaded(row: u32, i: u32) -> vec4<f32> {  // values 4 i to 4 i + 3 of a row of x
{% if columns % 4 == 0 %}
  {% if columns != blocks * values %}
  if (i >= K / 4u) { return vec4<f32>(); }
  {% endif %}
  return X[row * (K / 4u) + i];
{% else %}
  var v = vec4<f32>();
  {% for j in range(4) %}
  if (4u * i + {{ j }}u < K) { v[{{ j }}] = X[row * K + 4u * i + {{ j }}u]; }
  {% endfor %}
  return v;
{% endif %}
}

{% if subgroups %}
fn over_threads(x: f32) -> f32 {  // the sum over the TPR threads that share rows, which lie in one subgroup
  var sum = x;
  for (var step = TPR / 2u; step > 0u; step /= 2u) { sum += subgroupShuffleXor(sum, step); }
  return sum;
}
{% else %}
fn total(i: u32, first: u32) -> f32 {  // of accumulator i over the threads from `first` on
  var sum = 0.0;
  for (var j = 0u; j < TPR; j++) { sum += sums[i * {{ threads }}u + first + j]; }
  return sum;
}
{% endif %}

