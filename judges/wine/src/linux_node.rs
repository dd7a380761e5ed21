//! A Linux node beside a Windows node: Tortie's agent there, and pods that its plugin connects.

use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tortie_kernel::namespace::NetNs;
use tortie_servers::KubeApi;
use tortie_servers::programs::Program;

use super::frames::path_of;
use super::prefix::{Killed, output};
use super::underlay::{UPLINK, Underlay};

/// The name of the node.
pub(super) const LINUX_NODE: &str = "linux-1";
/// The file with what its daemon prints, in the folder of the test.
pub(super) const LOG: &str = "linux.log";
const PATIENCE: Duration = Duration::from_secs(60);
const INTERVAL: Duration = Duration::from_millis(100);

/// A daemon of the Linux node.
pub(super) struct Daemon(Killed);

impl Daemon {
    /// Starts it in the namespace of the Linux node. Its log is in the folder.
    pub(super) fn start(mut command: Command, underlay: &Underlay, folder: &Path) -> Result<Self> {
        underlay.linux.enter_on_spawn(&mut command)?;
        let log = File::options().create(true).append(true).open(folder.join(LOG))?;
        Ok(Self(Killed(command.stdout(log.try_clone()?).stderr(log).spawn()?)))
    }

    /// Fails if it has ended.
    pub(super) fn runs(&mut self) -> Result<()> {
        match self.0.0.try_wait()? {
            Some(status) => bail!("the daemon of the Linux node has ended: {status}"),
            None => Ok(()),
        }
    }
}

/// Builds `tortie` for this system.
pub(super) fn build_tortie() -> Result<PathBuf> {
    setup::program("tortie")
}

/// Tortie's agent with these options. Its files are in the folder.
pub(super) fn agent(program: &Path, kube: &KubeApi, folder: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(program);
    let store = format!("kubernetes:{}", kube.kubeconfig().display());
    command.args(["agent", "--node", LINUX_NODE, "--store", &store]).args(options);
    command.arg("--ip-autodetection-method").arg(format!("interface={UPLINK}"));
    for (flag, file) in [
        ("--cni-socket", "agent.sock"),
        ("--control-socket", "control.sock"),
        ("--deletion-queue", "queue"),
        ("--saved-state", "saved-state.json"),
        ("--cni-conf-dir", "net.d"),
    ] {
        command.arg(flag).arg(folder.join(file));
    }
    command
}

/// Connects a pod of the namespace `default` that the API has, as its runtime does by the configuration that the agent writes.
pub(super) fn add_pod(
    program: &Path,
    underlay: &Underlay,
    folder: &Path,
    name: &str,
) -> Result<(NetNs, Ipv4Addr)> {
    let file = folder.join("net.d").join(tortie_deploy::CNI_CONFIG_FILE);
    let end = Instant::now() + PATIENCE;
    while !file.exists() {
        ensure!(Instant::now() < end, "the agent writes no {}", file.display());
        std::thread::sleep(INTERVAL);
    }
    let list: Value = serde_json::from_str(&fs::read_to_string(file)?)?;
    let mut configuration = list["plugins"][0].clone();
    configuration["cniVersion"] = list["cniVersion"].clone();
    configuration["name"] = list["name"].clone();
    configuration["agentSocket"] = json!(folder.join("agent.sock"));
    if configuration["ipam"].is_object() {
        configuration["ipam"]["dataDir"] = json!(folder.join("linux-addresses"));
    }
    let input = folder.join("linux-input");
    fs::write(&input, configuration.to_string())?;
    let (pod, plugin) = (NetNs::create()?, folder.join("tortie-cni"));
    if !plugin.exists() {
        std::os::unix::fs::symlink(program, &plugin)?;
    }
    let mut command = Command::new(&plugin);
    command.env_clear().env("CNI_PATH", Program::CniPlugins.find()?).env("CNI_NETNS", path_of(&pod));
    command.stdin(File::open(&input)?);
    command.envs([("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", name), ("CNI_IFNAME", "eth0")]);
    command.env("CNI_ARGS", format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={name}"));
    underlay.linux.enter_on_spawn(&mut command)?;
    let result: Value = serde_json::from_slice(&output(&mut command)?.stdout)?;
    Ok((pod, address(&result)?))
}

/// The address in the result of ADD.
pub(super) fn address(result: &Value) -> Result<Ipv4Addr> {
    let address = result["ips"][0]["address"].as_str().and_then(|text| text.split('/').next());
    Ok(address.with_context(|| format!("ADD gave no address: {result}"))?.parse()?)
}

/// Makes the API server on the loopback of the Windows node reachable under the same address on the Linux node.
pub(super) fn relay(underlay: &Underlay, port: u16) -> Result<()> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let listener = underlay.linux.run(|| TcpListener::bind(address))??;
    let server = NetNs::open(&path_of(&underlay.windows))?;
    std::thread::spawn(move || {
        for near in listener.incoming().map_while(Result::ok) {
            let Ok(Ok(far)) = server.run(|| TcpStream::connect(address)) else { continue };
            let (Ok(near_end), Ok(far_end)) = (near.try_clone(), far.try_clone()) else { continue };
            for (mut from, mut to) in [(near_end, far_end), (far, near)] {
                std::thread::spawn(move || {
                    // The ends notice themselves when nothing comes any more.
                    let _ = io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    Ok(())
}
