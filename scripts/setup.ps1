# Makes .venv with the extras named, on Windows. Quick when nothing changed; scripts/setup is the same elsewhere.
#   powershell -ExecutionPolicy Bypass -File scripts\setup.ps1 [EXTRA ...]      default: litert
param([Parameter(ValueFromRemainingArguments = $true)] [string[]] $Extras = @("litert"))
$ErrorActionPreference = "Stop"
Set-Location -LiteralPath (Split-Path $PSScriptRoot)
$python = ".venv\Scripts\python.exe"
$needs = "ssmd needs Python 3.11, 3.12 or 3.13; none was found: install one, or name it: `$env:PYTHON = 'C:\...\python.exe'"

if (-not (Test-Path $python)) {
    $with = @($env:PYTHON)
    if (-not $env:PYTHON) {
        if (-not (Get-Command py -ErrorAction SilentlyContinue)) { throw $needs }
        $listed = (py --list) -join "`n"
        $version = "3.13", "3.12", "3.11" | Where-Object { $listed -match "-(V:)?$([regex]::Escape($_))\b" } | Select-Object -First 1
        if (-not $version) { throw $needs }
        $with = @("py", "-$version")
    }
    Write-Host "==> making .venv with $with"
    $rest = @($with | Select-Object -Skip 1) + @("-m", "venv", ".venv")
    & $with[0] $rest
    if ($LASTEXITCODE -ne 0) { throw "no environment could be made" }
}

$stamp = (Get-FileHash pyproject.toml).Hash.Substring(0, 16)
$missing = @($Extras | Where-Object { -not (Test-Path ".venv\.ssmd-$_-$stamp") })
if ($missing.Count -gt 0) {
    $names = $Extras -join ","
    Write-Host "==> installing ssmd-daemon[$names]"
    & $python -m pip --disable-pip-version-check install --no-input -e ".[$names]"
    if ($LASTEXITCODE -ne 0) { throw "pip could not install it" }
    $Extras | ForEach-Object { New-Item -ItemType File -Force ".venv\.ssmd-$_-$stamp" | Out-Null }
}
