// One token: y = W norm(x) + bias and what follows it, fused. TPR threads share RPT rows, so that x is read once for
// those rows; norm(x) = x * g / rms(x), its sum of squares taken in the same loop.
{% import "weights.wgsl" as weights %}
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}
{% include "product.wgsl" %}

const TPR = {{ threads_per_row }}u;
const RPT = {{ rows_per_thread }}u;
@group(0) @binding(2) var<storage, read> P: array<vec4<f32>>;  // gain (K), bias (N) and what the end needs, see Vectors
@group(0) @binding(3) var<storage, read> X: array<{{ "vec4<f32>" if columns % 4 == 0 else "f32" }}>;  // (T, K)
@group(0) @binding(4) var<storage, read_write> Y: array<f32>;  // (N), or as `end` says
{% if end in ("mamba1", "mamba2") %}
@group(0) @binding(5) var<storage, read_write> U: array<f32>;  // (C) after the convolution
@group(1) @binding(1) var<storage, read_write> CONV: array<f32>;  // (C, width - 1), oldest first
{% endif %}
{% if last_row %}
@group(1) @binding(0) var<storage, read> CTL: array<u32>;  // position, T, 0, 0, T tokens
{% endif %}

{% if not subgroups %}
var<workgroup> sums: array<f32, {{ 64 * (rows_per_thread + (1 if gain is not none else 0)) }}>;

{% endif %}
fn loaded(from0: u32, i: u32) -> vec4<f32> {  // values 4 i to 4 i + 3 of the row that begins at `from0`
{% if columns % 4 == 0 %}
  {% if columns != blocks * values %}
  if (i >= K / 4u) { return vec4<f32>(); }
  {% endif %}
  return X[from0 / 4u + i];
{% else %}
  var v = vec4<f32>();
  {% for j in range(4) %}
  if (4u * i + {{ j }}u < K) { v[{{ j }}] = X[from0 + 4u * i + {{ j }}u]; }
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
  for (var j = 0u; j < TPR; j++) { sum += sums[i * 64u + first + j]; }
  return sum;
}
{% endif %}

fn finished(i: u32, sum: f32, rms: f32) -> f32 {  // row i of this shader
  let r = row_of(i);
  return sum{% if format == "int8" %} * S[r]{% endif %}{% if gain is not none %} * rms{% endif %}{% if bias is not none %} + p({{ bias }}u + r){% endif %};
}
{% if end in ("mamba1", "mamba2") %}

fn convolved(c: u32, v: f32) -> f32 {  // takes a channel's new value in and moves its state on
  let at = c * {{ width - 1 }}u;
  let weight = {{ conv }}u + c * {{ width }}u;
  var sum = {{ "p(%du + c)" % conv_bias if conv_bias is not none else "0.0" }} + p(weight + {{ width - 1 }}u) * v;
  {% for k in range(width - 1) %}
  let s{{ k }} = CONV[at + {{ k }}u];
  sum += p(weight + {{ k }}u) * s{{ k }};
  {% endfor %}
  {% for k in range(1, width - 1) %}
  CONV[at + {{ k - 1 }}u] = s{{ k }};
  {% endfor %}
  CONV[at + {{ width - 2 }}u] = v;
  return silu(sum);
}
{% endif %}

fn end(r: u32, v: f32) {
{% if end == "store" %}
  Y[{{ first }}u + r] = v;
{% elif end == "add" %}
  Y[r] += v;
{% elif end == "relu2" %}
  let a = max(v, 0.0);
  Y[r] = a * a;
{% elif end == "mamba1" %}
  if (r < {{ channels }}u) { U[r] = convolved(r, v); }  // rows: conv input, gate
  Y[r] = v;
{% elif end == "mamba2" %}
  let c = r - {{ inner }}u;  // rows: gate, conv input, dt
  if (r >= {{ inner }}u && c < {{ channels }}u) { U[c] = convolved(c, v); }
  Y[r] = v;
{% endif %}
}

@compute @workgroup_size(64)
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) li: u32,
) {
  let lane = li % TPR;
  let base = ((group.y * groups.x + group.x) * {{ 64 // threads_per_row }}u + li / TPR) * RPT;
  let from0 = {{ "(CTL[1] - 1u) * K" if last_row else "0u" }};
  {% for i in range(rows_per_thread) %}
  let r{{ i }} = row_of(base + {{ i }}u) * KB;
  var a{{ i }} = 0.0;
  {% endfor %}
  var squares = 0.0;
  for (var b = lane; b < KB; b += TPR) {
    {% for i in range(values // 4) %}
    var x{{ i }} = loaded(from0, b * {{ values // 4 }}u + {{ i }}u);
    {% if gain is not none %}
    squares += dot(x{{ i }}, x{{ i }});
    {% if columns % 4 == 0 and columns == blocks * values %}
    x{{ i }} *= P[{{ gain // 4 }}u + b * {{ values // 4 }}u + {{ i }}u];
    {% else %}
    x{{ i }} *= P[min({{ gain // 4 }}u + b * {{ values // 4 }}u + {{ i }}u, arrayLength(&P) - 1u)];
    {% endif %}
    {% endif %}
    {% endfor %}
    {% for i in range(rows_per_thread) %}
    {
      let w = W[r{{ i }} + b];
      var s = 0.0;
      {% for j in range(values // 4) %}
      s += dot({{ weights.part(format, j) }}, x{{ j }});
      {% endfor %}
      a{{ i }} += s{% if format == "int4" %} * block_scale(r{{ i }} + b){% endif %};
    }
    {% endfor %}
  }
  {% if subgroups %}
  var totals: array<f32, RPT>;
  {% for i in range(rows_per_thread) %}
  totals[{{ i }}] = over_threads(a{{ i }});
  {% endfor %}
  {% if gain is not none %}
  let rms = inverseSqrt(over_threads(squares) / f32(K) + {{ eps }});
  {% else %}
  let rms = 1.0;
  {% endif %}
  {% else %}
  {% for i in range(rows_per_thread) %}
  sums[{{ i * 64 }}u + li] = a{{ i }};
  {% endfor %}
  {% if gain is not none %}
  sums[{{ rows_per_thread * 64 }}u + li] = squares;
  {% endif %}
  workgroupBarrier();
  let first = li - lane;
  {% if gain is not none %}
  let rms = inverseSqrt(total(RPT, first) / f32(K) + {{ eps }});
  {% else %}
  let rms = 1.0;
  {% endif %}
  {% endif %}
  {% set total = "totals[%s]" if subgroups else "total(%s, first)" %}
  {% if end == "swiglu" %}
  let i = base + 2u * lane;
  if (2u * lane < RPT && i + 1u < N) {
    let gate = finished(i, {{ total % "2u * lane" }}, rms);
    Y[i / 2u] = silu(gate) * finished(i + 1u, {{ total % "2u * lane + 1u" }}, rms);
  }
  {% else %}
  let i = base + lane;
  if (lane < RPT && i < N) { end(i, finished(i, {{ total % "lane" }}, rms)); }
  {% endif %}
}
