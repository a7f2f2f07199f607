# Makes .venv with the named extras on Windows, and repairs one that is half made. Quick if nothing changed. On other
# systems scripts/setup does the same. It prints a line for each step. pip's output goes to .cache\setup.log.
#   powershell -ExecutionPolicy Bypass -File scripts\setup.ps1 [EXTRA ...]      default: litert
param([Parameter(ValueFromRemainingArguments = $true)] [string[]] $Extras = @("litert"))
$ErrorActionPreference = "Stop"
Set-Location -LiteralPath (Split-Path $PSScriptRoot)
$python = ".venv\Scripts\python.exe"
$log = ".cache\setup.log"
New-Item -ItemType Directory -Force ".cache" | Out-Null
$versions = "3.14", "3.13", "3.12", "3.11"
if ($Extras -contains "build" -or $Extras -contains "coreml") { $versions = "3.13", "3.12", "3.11" } # coremltools 9.0 has no package for 3.14
$needs = "ssmd needs Python 3.11 to $($versions[0]) for $Extras; none was found: install one, or name it: `$env:PYTHON = 'C:\...\python.exe'"

function Step([string] $what, [string[]] $command) {
    Write-Host "==> $what"
    $ErrorActionPreference = "Continue" # else the first line that goes to stderr ends this
    $rest = @($command | Select-Object -Skip 1)
    & $command[0] $rest 2>&1 | ForEach-Object { "$_" } | Out-File -Encoding utf8 $log
}

function Stop-Broken([string] $what) {
    $said = Get-Content $log -ErrorAction SilentlyContinue
    $why = @($said | Where-Object { $_ -match "^\s*error" } | Select-Object -Last 1)[0]
    if ($said -match "No space left on device|not enough space on the disk") {
        $why = "no room on the disk of $(Get-Location)"
    } elseif ($said -match "Cannot connect to proxy|ProxyError") {
        $why = "no network: the proxy of HTTPS_PROXY, HTTP_PROXY or ALL_PROXY does not answer"
    } elseif ($said -match "establish a new connection|NameResolutionError|getaddrinfo failed|ConnectTimeout|Max retries") {
        $why = "no network: pip cannot reach the package index; run the same command again once there is one"
    }
    throw "${what}: $why; the full output is in $log"
}

function New-Environment {
    $with = @($env:PYTHON)
    if (-not $env:PYTHON) {
        if (-not (Get-Command py -ErrorAction SilentlyContinue)) { throw $needs }
        $listed = (py --list) -join "`n"
        $version = $versions | Where-Object { $listed -match "-(V:)?$([regex]::Escape($_))\b" } | Select-Object -First 1
        if (-not $version) { throw $needs }
        $with = @("py", "-$version")
    }
    Step "making .venv with $with" ($with + @("-m", "venv", "--clear", ".venv"))
    if ($LASTEXITCODE -ne 0) { Stop-Broken "no .venv could be made" }
}

function Test-Environment([string] $statement) {
    $ErrorActionPreference = "Continue"
    if (-not (Test-Path $python)) { return $false }
    & $python -c $statement 2>&1 | Out-Null
    return $LASTEXITCODE -eq 0
}

$stamp = (Get-FileHash pyproject.toml).Hash.Substring(0, 16)
$missing = @($Extras | Where-Object { -not (Test-Path ".venv\.ssmd-$_-$stamp") })
if (-not (Test-Environment "import sys; sys.exit(sys.prefix == sys.base_prefix)")) {
    New-Environment
    $missing = $Extras
}
if ($missing.Count -gt 0) {
    if (-not (Test-Environment "import pip")) { # it is half made
        Step "mending .venv, which has no pip" @($python, "-m", "ensurepip", "--upgrade")
        if ($LASTEXITCODE -ne 0) { New-Environment }
    }
    $names = $Extras -join ","
    Step "installing ssmd-daemon[$names]" @($python, "-m", "pip", "--disable-pip-version-check", "install", "--no-input", "-e", ".[$names]")
    if ($LASTEXITCODE -ne 0) { Stop-Broken "ssmd-daemon[$names] could not be installed" }
    $Extras | ForEach-Object { New-Item -ItemType File -Force ".venv\.ssmd-$_-$stamp" | Out-Null }
}
