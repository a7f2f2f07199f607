// One token of each of STREAMS streams: y = W norm(x) + bias and what follows it, fused. TPR threads share RPT rows, so
// that x is read once for those rows, and a weight once for all streams. norm(x) = x * g / rms(x), its sum of squares
// taken in the same loop. Each stream has its own sums, in the same order however many there are: those of UNIT blocks,
// of every TPR-th unit, of the threads.
{% import "weights.wgsl" as weights %}
{% include "numbers.wgsl" %}
{% include "vectors.wgsl" %}
{% include "product.wgsl" %}

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

{% include "rows.wgsl" %}
{{ weights.finished(format, "S", gain is not none, bias) }}
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

fn end(stream: u32, r: u32, sum: f32, rms: f32) {
  let at = stream * {{ stride }}u + {{ first }}u + r;
  let v = finished_S(r, sum, rms, {{ "Y[at]" if end == "add" else "0.0" }});
{% if end in ("store", "add") %}
  Y[at] = v;
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

@compute @workgroup_size({{ threads }})
fn main(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(num_workgroups) groups: vec3<u32>,
  @builtin(local_invocation_index) li: u32,
) {
  let lane = li % TPR;
  let base = ((group.y * groups.x + group.x) * {{ threads // threads_per_row }}u + li / TPR) * RPT;
  let row = {{ "CTL[1] - 1u" if last_row else "0u" }};  // of x
  {% include "row_sums.wgsl" %}
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
    let gate = finished_S(row_of(i), {{ total % "at * STREAMS + stream" }}, rms, 0.0);
    let up = finished_S(row_of(i + 1u), {{ total % "(at + 1u) * STREAMS + stream" }}, rms, 0.0);
    Y[stream * {{ stride }}u + i / 2u] = silu(gate) * up;
    {% else %}
    end(stream, i, {{ total % "at * STREAMS + stream" }}, rms);
    {% endif %}
  }
}
