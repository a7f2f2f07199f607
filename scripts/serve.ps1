# Sets everything up and serves the default model, on Windows. Arguments go to `ssmd serve`.
#   powershell -ExecutionPolicy Bypass -File scripts\serve.ps1 [MODEL] [--port N] ...
# With `--runtime openvino`, `npu` or `wgpu` it installs that runtime. On ARM it is wgpu: no other has packages there.
$ErrorActionPreference = "Stop"
$given = @($args)
$runtime = "litert"
if ($env:PROCESSOR_ARCHITECTURE -eq "ARM64") { $runtime = "wgpu" }
$asked = " " + (($given -join " ") -replace "--runtime=", "--runtime ") + " "
if ($asked -match " --runtime (openvino|npu) ") { $runtime = "openvino" }
if ($asked -match " --runtime wgpu ") { $runtime = "wgpu" }
& (Join-Path $PSScriptRoot "setup.ps1") $runtime
if ($given.Count -eq 0 -or "$($given[0])".StartsWith("-")) { $given = @("smollm2") + $given }
Set-Location -LiteralPath (Split-Path $PSScriptRoot)
& ".venv\Scripts\ssmd.exe" serve $given
exit $LASTEXITCODE
