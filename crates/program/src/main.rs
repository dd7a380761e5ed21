//! The program `tortie` with the lab, which packages leave out.
//!
//! Depending on the name it is called by, it is also the emulated HNS (`tortie-hns`) and the process in a lab's pods
//! (`tortie-pod`), besides what every build is: one build creates everything that a lab needs.

mod lab;

use std::process::ExitCode;

fn main() -> ExitCode {
    tortie_cli::run(Some(&lab::LocalLab))
}
