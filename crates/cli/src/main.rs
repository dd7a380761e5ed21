//! The program of packages, which contains no lab. Packages call it `tortie`.

use std::process::ExitCode;

fn main() -> ExitCode {
    tortie_cli::run(None)
}
