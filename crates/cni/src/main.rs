//! `tortie-cni`, the plugin that runtimes execute.

use std::process::ExitCode;

fn main() -> ExitCode {
    tortie_cni::plugin::main()
}
