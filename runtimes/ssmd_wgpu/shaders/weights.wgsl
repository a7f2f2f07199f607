{# A matrix (N, K) as the file holds it, rows padded with zeros to whole blocks of 16 bytes: KB blocks a row.
   f32: 4 values a block. f16: 8. int8: 16, a scale for each row. int4: 32, a scale for each block. #}
{% macro declare(format) %}
@group(0) @binding(0) var<storage, read> W: array<vec4<{{ "f32" if format == "f32" else "u32" }}>>;  // (N, KB)
{% if format == "int8" %}
@group(0) @binding(1) var<storage, read> S: array<f32>;  // (N)
{% elif format == "int4" %}
@group(0) @binding(1) var<storage, read> S: array<u32>;  // (N, KB) halves, two in each

fn block_scale(block: u32) -> f32 {
  return unpack2x16float(S[block / 2u])[block % 2u];
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
