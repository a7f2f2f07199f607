// One token of each of STREAMS streams: y = W norm(x) + bias and what follows it, fused. TPR threads share RPT rows, so
// that x is read once for those rows, and a weight once for all streams. norm(x) = x * g / rms(x), its sum of squares
// taken in the same loop. Each stream has its own sums, in the same order however many there are.
{% import "weights.wgsl" as weights %}
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}
{% include "product.wgsl" %}

const TPR = {{ threads_per_row }}u;
const RPT = {{ rows_per_thread }}u;
const STREAMS = {{ streams }}u;
@group(0) @binding(2) var<storage, read> P: array<vec4<f32>>;  // gain (K), bias (N) and what the end needs, see Vectors
@group(0) @binding(3) var<storage, read> X: array<{{ "vec4<f32>" if columns % 4 == 0 else "f32" }}>;  // (T, K)
@group(0) @binding(4) var<storage, read_write> Y: array<f32>;  // (STREAMS, stride), or as `end` says
{% if end in ("mamba1", "mamba2") %}
@group(0) @binding(5) var<storage, read_write> U: array<f32>;  // (STREAMS, C) after the convolution
@group(1) @binding(1) var<storage, read_write> CONV: array<f32>;  // (slots, C, width - 1), oldest first
{% endif %}
{% if last_row or streams > 1 or end in ("mamba1", "mamba2") %}
{% include "control.wgsl" %}
{% endif %}

{% if not subgroups %}
var<workgroup> sums: array<f32, {{ 64 * streams * (rows_per_thread + (1 if gain is not none else 0)) }}>;

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
  for (var j = 0u; j < TPR; j++) { sum += sums[i * 64u + first + j]; }
  return sum;
}
{% endif %}

fn finished(i: u32, sum: f32, rms: f32) -> f32 {  // row i of this shader
  let r = row_of(i);
  return sum{% if format == "int8" %} * S[r]{% endif %}{% if gain is not none %} * rms{% endif %}{% if bias is not none %} + p({{ bias }}u + r){% endif %};
}
{% if end in ("mamba1", "mamba2") %}

fn convolved(stream: u32, c: u32, v: f32) -> f32 {  // takes a channel's new value in and moves its state on
  let at = (CTL[4u * stream + 2u] * {{ channels }}u + c) * {{ width - 1 }}u;
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

fn end(stream: u32, r: u32, v: f32) {
  let at = stream * {{ stride }}u + {{ first }}u + r;
{% if end == "store" %}
  Y[at] = v;
{% elif end == "add" %}
  Y[at] += v;
{% elif end == "relu2" %}
  let a = max(v, 0.0);
  Y[at] = a * a;
{% elif end == "mamba1" %}
  if (r < {{ channels }}u) { U[stream * {{ channels }}u + r] = convolved(stream, r, v); }  // rows: conv input, gate
  Y[at] = v;
{% elif end == "mamba2" %}
  let c = r - {{ inner }}u;  // rows: gate, conv input, dt
  if (r >= {{ inner }}u && c < {{ channels }}u) { U[stream * {{ channels }}u + c] = convolved(stream, c, v); }
  Y[at] = v;
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
  let row = {{ "CTL[1] - 1u" if last_row else "0u" }};  // of x
  {% for i in range(rows_per_thread) %}
  let r{{ i }} = row_of(base + {{ i }}u) * KB;
  {% for c in range(streams) %}
  var a{{ i }}_{{ c }} = 0.0;
  {% endfor %}
  {% endfor %}
  {% for c in range(streams) if gain is not none %}
  var squares{{ c }} = 0.0;
  {% endfor %}
  for (var b = lane; b < KB; b += TPR) {
    {% for i in range(rows_per_thread) %}
    let w{{ i }} = W[r{{ i }} + b];
    {% for c in range(streams) %}
    var s{{ i }}_{{ c }} = 0.0;
    {% endfor %}
    {% endfor %}
    {% for j in range(values // 4) %}
    {
      let k = b * {{ values // 4 }}u + {{ j }}u;
      {% if gain is not none and columns % 4 == 0 and columns == blocks * values %}
      let g = P[{{ gain // 4 }}u + k];
      {% elif gain is not none %}
      let g = P[min({{ gain // 4 }}u + k, arrayLength(&P) - 1u)];
      {% endif %}
      {% for c in range(streams) %}
      var x{{ c }} = loaded(row + {{ c }}u, k);
      {% if gain is not none %}
      squares{{ c }} += dot(x{{ c }}, x{{ c }});
      x{{ c }} *= g;
      {% endif %}
      {% endfor %}
      {% for i in range(rows_per_thread) %}
      {
        let v = {{ weights.part(format, "w%d" % i, j) }};
        {% for c in range(streams) %}
        s{{ i }}_{{ c }} += dot(v, x{{ c }});
        {% endfor %}
      }
      {% endfor %}
    }
    {% endfor %}
    {% for i in range(rows_per_thread) %}
    {
      {% if format == "int4" %}
      let scale = block_scale(r{{ i }} + b);
      {% endif %}
      {% for c in range(streams) %}
      a{{ i }}_{{ c }} += s{{ i }}_{{ c }}{{ " * scale" if format == "int4" }};
      {% endfor %}
    }
    {% endfor %}
  }
  {% if subgroups %}
  var totals: array<f32, RPT * STREAMS>;
  var scales: array<f32, STREAMS>;
  {% for c in range(streams) %}
  {% for i in range(rows_per_thread) %}
  totals[{{ i * streams + c }}] = over_threads(a{{ i }}_{{ c }});
  {% endfor %}
  {% if gain is not none %}
  scales[{{ c }}] = inverseSqrt(over_threads(squares{{ c }}) / f32(K) + {{ eps }});
  {% endif %}
  {% endfor %}
  {% else %}
  {% for c in range(streams) %}
  {% for i in range(rows_per_thread) %}
  sums[{{ (i * streams + c) * 64 }}u + li] = a{{ i }}_{{ c }};
  {% endfor %}
  {% if gain is not none %}
  sums[{{ (rows_per_thread * streams + c) * 64 }}u + li] = squares{{ c }};
  {% endif %}
  {% endfor %}
  workgroupBarrier();
  let first = li - lane;
  {% endif %}
  {% set total = "totals[%s]" if subgroups else "total(%s, first)" %}
  {% set rms = "scales[stream]" if subgroups else "inverseSqrt(total(RPT * STREAMS + stream, first) / f32(K) + %s)" % eps %}
  {% set pair = 2 if end == "swiglu" else 1 %}
  for (var j = lane; j < RPT / {{ pair }}u * STREAMS; j += TPR) {
    let stream = j % STREAMS;
    let at = j / STREAMS * {{ pair }}u;  // of this thread's rows
    let i = base + at;
    if (i + {{ pair }}u > N{{ " || stream >= CTL[1]" if streams > 1 }}) { continue; }
    let rms = {{ rms if gain is not none else "1.0" }};
    {% if end == "swiglu" %}
    let gate = finished(i, {{ total % "at * STREAMS + stream" }}, rms);
    Y[stream * {{ stride }}u + i / 2u] = silu(gate) * finished(i + 1u, {{ total % "(at + 1u) * STREAMS + stream" }}, rms);
    {% else %}
    end(stream, i, finished(i, {{ total % "at * STREAMS + stream" }}, rms));
    {% endif %}
  }
}
