//! Executes another IPAM plugin, as the specification says (section 4, "Execution of delegated plugins"): with the
//! environment and the configuration of this call.

use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::process::{self, Stdio};
use std::{env, io};

use serde_json::Value;

use crate::{Code, Command, Failure};

/// Executes the plugin of this name, from the folders of `CNI_PATH`, and returns what it prints.
///
/// # Errors
/// It does not exist, or cannot be executed; or its own failure, with its code.
pub(super) fn execute(
    name: &str,
    command: Command,
    folders: &str,
    config: &[u8],
) -> Result<Option<Value>, Failure> {
    let program = find(name, folders)?;
    let failed = |error: &io::Error| {
        Failure::new(Code::IO, format!("the IPAM plugin {name} cannot be executed"), error.to_string())
    };
    let mut child = process::Command::new(program)
        .env("CNI_COMMAND", command.name())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| failed(&error))?;
    let written = child.stdin.take().map_or(Ok(()), |mut input| input.write_all(config));
    // A plugin may end without reading its configuration.
    written
        .or_else(|error| if error.kind() == ErrorKind::BrokenPipe { Ok(()) } else { Err(failed(&error)) })?;
    let output = child.wait_with_output().map_err(|error| failed(&error))?;
    let printed = serde_json::from_slice::<Value>(&output.stdout);
    if output.status.success() {
        return match printed {
            Ok(document) => Ok(Some(document)),
            Err(_) if output.stdout.trim_ascii().is_empty() => Ok(None),
            Err(error) => Err(unreadable(name, &error)),
        };
    }
    let document = printed.unwrap_or_default();
    let text = |member: &str| document[member].as_str().unwrap_or_default().to_owned();
    let code = document["code"].as_u64().and_then(|code| u32::try_from(code).ok());
    let details = if document.is_object() { text("details") } else { output.status.to_string() };
    let msg = format!("the IPAM plugin {name} failed: {}", text("msg"));
    Err(Failure::new(code.filter(|code| *code > 0).map_or(Code::IPAM, Code), msg, details))
}

fn unreadable(name: &str, error: &serde_json::Error) -> Failure {
    let msg = format!("the result of the IPAM plugin {name} cannot be read");
    Failure::new(Code::DECODING, msg, error.to_string())
}

fn find(name: &str, folders: &str) -> Result<PathBuf, Failure> {
    let mut programs = env::split_paths(folders).map(|folder| folder.join(name));
    programs.find(|program| program.is_file()).ok_or_else(|| {
        let msg = format!("the IPAM plugin {name} (ipam.type) is not in CNI_PATH ({folders})");
        Failure::new(Code::INVALID_ENVIRONMENT, msg, "install it there, or set ipam.type to calico-ipam")
    })
}
