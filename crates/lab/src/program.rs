//! Pods that run this program itself: of all images, the lab has only this one. Such a pod may end, and nobody starts it
//! again (`restartPolicy: Never`).

use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::process::Child;
use tokio::task::JoinHandle;
use tortie_kernel::namespace::{NetNs, with_own_mounts};

use crate::pod_status::End;
use crate::{LabDir, LabError};

/// The image of pods whose containers run this program, with their `args`.
pub const IMAGE: &str = "tortie.io/lab-program";
/// How much of the output a pod's status has, as with `terminationMessagePolicy: FallbackToLogsOnError`.
const MESSAGE: usize = 2048;

/// The arguments, if one of these containers has the image of the program.
pub(crate) fn arguments(containers: &[Value]) -> Option<Vec<String>> {
    let container = containers.iter().find(|container| container["image"] == IMAGE)?;
    let arguments = container["args"].as_array().into_iter().flatten();
    Some(arguments.filter_map(Value::as_str).map(str::to_owned).collect())
}

/// A running program of a pod. Dropping the value kills it.
pub(crate) struct Program {
    child: Child,
    /// Reads its output, and returns the end of it.
    output: Option<JoinHandle<String>>,
}

impl Program {
    pub(crate) fn start(
        dir: &LabDir,
        netns: &NetNs,
        arguments: &[String],
        resolver: Option<&Path>,
    ) -> Result<Self, LabError> {
        let mut command = Command::new(dir.binary("tortie"));
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped());
        netns.enter_on_spawn(&mut command)?;
        with_own_mounts(&mut command, resolver);
        let starting = LabError::io("starting the program of a pod");
        let mut child =
            tokio::process::Command::from(command).kill_on_drop(true).spawn().map_err(starting)?;
        let output = child.stdout.take().map(|mut output| {
            tokio::spawn(async move {
                let (mut tail, mut buffer) = (Vec::new(), [0; MESSAGE]);
                while let Ok(length @ 1..) = output.read(&mut buffer).await {
                    tail.extend_from_slice(&buffer[..length]);
                    tail.drain(..tail.len().saturating_sub(MESSAGE));
                }
                String::from_utf8_lossy(&tail).into_owned()
            })
        });
        Ok(Self { child, output })
    }

    /// Waits until it ends. May be cancelled and called again.
    pub(crate) async fn end(&mut self) -> End {
        let status = self.child.wait().await;
        let output = match self.output.take() {
            Some(output) => output.await.unwrap_or_default(),
            None => String::new(),
        };
        let code = status.ok().and_then(|status: ExitStatus| status.code()).unwrap_or(137);
        End { code, message: if code == 0 { String::new() } else { output } }
    }

    pub(crate) async fn kill(mut self) {
        // It has ended already, or ends now.
        let _ = self.child.kill().await;
    }
}
