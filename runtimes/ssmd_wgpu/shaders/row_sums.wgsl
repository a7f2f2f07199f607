{# The sums of rows `base` to `base` + RPT for rows `row` on of x; `rows_apart`: for its rows row0, row1 and so on. Of TPR threads each takes every TPR-th unit of blocks, from
   its `lane` on: units are summed up by themselves, then those of a thread, then those of the threads. While there are
   enough, `ahead` units are read before the first is used; they are summed up in the same order. #}
{# A unit begins: its own sums. #}
{% macro begun() %}
    {% for c in range(streams) %}
    {% for i in range(rows_per_thread) %}
    var u{{ i }}_{{ c }} = 0.0;
    {% endfor %}
    {% if gain is not none %}
    var q{{ c }} = 0.0;
    {% endif %}
    {% endfor %}
{% endmacro %}
{# A block `b` of a unit, whose weights are named `w` of row i and what is `of` this block. #}
{% macro block(of) %}
      {% for i in range(rows_per_thread) %}
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
        var x{{ c }} = loaded({{ "row%d" % c if rows_apart is defined else "row + %du" % c }}, k);
        {% if gain is not none %}
        q{{ c }} += dot(x{{ c }}, x{{ c }});
        x{{ c }} *= g;
        {% endif %}
        {% endfor %}
        {% for i in range(rows_per_thread) %}
        {
          let v = {{ weights.part(format, "w%d%s" % (i, of), j) }};
          {% for c in range(streams) %}
          {{ weights.added(format, "s%d_%d" % (i, c), "v", "x%d" % c) }}
          {% endfor %}
        }
        {% endfor %}
      }
      {% endfor %}
      {% for i in range(rows_per_thread) %}
      {
        {% if format == "int4" %}
        let scale = scale_S(r{{ i }} + b);
        {% endif %}
        {% for c in range(streams) %}
        u{{ i }}_{{ c }} = {{ "fma(s%d_%d, scale, u%d_%d)" % (i, c, i, c) if format == "int4" else "u%d_%d + s%d_%d" % (i, c, i, c) }};
        {% endfor %}
      }
      {% endfor %}
{% endmacro %}
{# A unit ends: to the thread's sums. #}
{% macro ended() %}
    {% for c in range(streams) %}
    {% for i in range(rows_per_thread) %}
    a{{ i }}_{{ c }} += u{{ i }}_{{ c }};
    {% endfor %}
    {% if gain is not none %}
    squares{{ c }} += q{{ c }};
    {% endif %}
    {% endfor %}
{% endmacro %}
  {% for i in range(rows_per_thread) %}
  let r{{ i }} = row_of(base + {{ i }}u) * KB;
  {% for c in range(streams) %}
  var a{{ i }}_{{ c }} = 0.0;
  {% endfor %}
  {% endfor %}
  {% for c in range(streams) if gain is not none %}
  var squares{{ c }} = 0.0;
  {% endfor %}
  var u = lane;
  {% if ahead > 1 %}
  for (; u + {{ ahead - 1 }}u * TPR < KB / {{ unit }}u; u += {{ ahead }}u * TPR) {
    {% for k in range(ahead) %}
    {% for e in range(unit) %}
    {% for i in range(rows_per_thread) %}
    let w{{ i }}_{{ k }}_{{ e }} = W[r{{ i }} + (u + {{ k }}u * TPR) * {{ unit }}u + {{ e }}u];
    {% endfor %}
    {% endfor %}
    {% endfor %}
    {% for k in range(ahead) %}
    {
    {{ begun() }}
      {% for e in range(unit) %}
      {
      let b = (u + {{ k }}u * TPR) * {{ unit }}u + {{ e }}u;
      {{ block("_%d_%d" % (k, e)) }}
      }
      {% endfor %}
    {{ ended() }}
    }
    {% endfor %}
  }
  {% endif %}
  for (; u * {{ unit }}u < KB; u += TPR) {
    {{ begun() }}
    {% if unit > 1 %}
    for (var b = u * {{ unit }}u; b < min(u * {{ unit }}u + {{ unit }}u, KB); b++) {
    {% else %}
    {
      let b = u;
    {% endif %}
      {% for i in range(rows_per_thread) %}
      let w{{ i }} = W[r{{ i }} + b];
      {% endfor %}
      {{ block("") }}
    }
    {{ ended() }}
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
  sums[{{ (i * streams + c) * threads }}u + li] = a{{ i }}_{{ c }};
  {% endfor %}
  {% if gain is not none %}
  sums[{{ (rows_per_thread * streams + c) * threads }}u + li] = squares{{ c }};
  {% endif %}
  {% endfor %}
  workgroupBarrier();
  let first = li - lane;
  {% endif %}
