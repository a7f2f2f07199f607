{# A matrix (N, K) as the file holds it, rows padded with zeros to whole blocks of 16 bytes: KB blocks a row.
   f32: 4 values a block. f16: 8. int8: 16, a scale for each row. int4: 32, a scale for each block. #}
{% macro declare(format, w="W", s="S", at=0) %}
@group(0) @binding({{ at }}) var<storage, read> {{ w }}: array<vec4<{{ "f32" if format == "f32" else "u32" }}>>;  // (N, KB)
{% if format == "int8" %}
@group(0) @binding({{ at + 1 }}) var<storage, read> {{ s }}: array<f32>;  // (N)
{% elif format == "int4" %}
@group(0) @binding({{ at + 1 }}) var<storage, read> {{ s }}: array<u32>;  // (N, KB) halves, two in each

fn scale_{{ s }}(block: u32) -> f32 {
  return unpack2x16float({{ s }}[block / 2u])[block % 2u];
}
{% endif %}
{% endmacro %}
{# Values 4 i to 4 i + 3 of a block named `w`, before any scale. #}
{% macro part(format, w, i) %}
{%- if format == "f32" -%} {{ w }}
{%- elif format == "f16" -%} vec4<f32>(unpack2x16float({{ w }}[{{ 2 * i }}]), unpack2x16float({{ w }}[{{ 2 * i + 1 }}]))
{%- elif format == "int8" -%} vec4<f32>(unpack4xI8({{ w }}[{{ i }}]))
{%- else -%} (vec4<f32>(unpack4xU8(({{ w }}[{{ i // 2 }}]{{ " >> 4u" if i % 2 }}) & 0x0f0f0f0fu)) - 8.0)
{%- endif -%}
{% endmacro %}
{# Adds to s the product of 4 weights and 4 values of x. Of int4 a driver compiled it one way for 8 rows of one stream and
   another way for 4 rows of 8 streams: each multiplication and addition is written out. #}
{% macro added(format, s, v, x) %}
{%- if format == "int4" -%} { let f = {{ v }}; {{ s }} = fma(f.w, {{ x }}.w, fma(f.z, {{ x }}.z, fma(f.y, {{ x }}.y, fma(f.x, {{ x }}.x, {{ s }})))); }
{%- else -%} {{ s }} += dot({{ v }}, {{ x }});
{%- endif -%}
{% endmacro %}
{# Of a row r whose blocks gave `sum`: that with the row's scale and 1 / rms of x, where there are such, added to `base` and
   the bias. What rounds is written out: kernels that compute the same value must not be contracted differently. #}
{% macro finished(format, s, scaled, bias) %}
fn finished_{{ s }}(r: u32, sum: f32, rms: f32, base: f32) -> f32 {
  let start = base{% if bias is not none %} + p({{ bias }}u + r){% endif %};
{% if format == "int8" %}
  return fma(sum, {{ s }}[r]{{ " * rms" if scaled }}, start);
{% elif scaled %}
  return fma(sum, rms, start);
{% else %}
  return sum + start;
{% endif %}
}
{% endmacro %}
