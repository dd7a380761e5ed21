//! Measurements, each beside a named peer in the same run. They print figures and ratios, and assert nothing.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for the terminal of whoever builds")]

mod calls;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use calls::Calls;
use setup::{cargo, go, image, packages, run as run_command, workspace};

/// The number of pods that are added and deleted.
const PODS: usize = 100;
/// How often they are added and deleted.
const ROUNDS: usize = 5;
/// How many pods are added at once in the second part.
const PARALLEL: usize = 10;
/// How often the demo is timed.
const DEMOS: usize = 5;

/// The measurements.
const NAMES: [&str; 9] =
    ["addresses", "bgp", "calc", "cni", "demo", "kubernetes", "nftables", "vxlan", "windows"];

fn main() -> std::process::ExitCode {
    setup::command::main(run)
}

/// Runs the measurements of these names, or all without names.
fn run(names: &[&str]) -> Result<()> {
    if names == [calls::CALLS] {
        return calls::serve();
    }
    let wanted = |name: &str| names.is_empty() || names.contains(&name);
    if let Some(unknown) = names.iter().find(|name| !NAMES.contains(name)) {
        bail!("there is no benchmark {unknown:?}; there are {}", NAMES.join(", "));
    }
    if wanted("addresses") {
        packages::install(&packages::SERVER_PACKAGES)?;
        go::build_kube()?;
        cargo(&["bench", "--quiet", "--package", "tortie-ipam", "--bench", "addresses"])?;
    }
    if wanted("bgp") {
        packages::require_root("the benchmark of BGP")?;
        packages::install(&packages::BGP_PACKAGES)?;
        cargo(&["bench", "--quiet", "--package", "tortie-bgp", "--bench", "mesh"])?;
    }
    if wanted("calc") {
        calc()?;
    }
    if wanted("windows") {
        cargo(&["bench", "--quiet", "--package", "tortie-windows", "--bench", "compile"])?;
    }
    if wanted("nftables") {
        packages::require_root("the benchmarks of nftables")?;
        packages::install(&packages::TEST_PACKAGES)?;
        for bench in ["table", "members", "new_connections"] {
            cargo(&["bench", "--quiet", "--package", "tortie-linux", "--bench", bench])?;
        }
    }
    if wanted("vxlan") {
        packages::require_root("the benchmarks of VXLAN")?;
        packages::install(&packages::TEST_PACKAGES)?;
        packages::install(&packages::BENCH_PACKAGES)?;
        for bench in ["vxlan", "vxlan_throughput"] {
            cargo(&["bench", "--quiet", "--package", "tortie-linux", "--bench", bench])?;
        }
    }
    if wanted("kubernetes") {
        packages::require_root("the benchmarks on the Kubernetes API")?;
        packages::install(&packages::SERVER_PACKAGES)?;
        go::build_kube()?;
        cargo(&["bench", "--quiet", "--package", "tortie-agent", "--bench", "kubernetes"])?;
    }
    if wanted("cni") || wanted("demo") {
        packages::require_root("the benchmarks of CNI and the demo")?;
        packages::install(&packages::BENCH_PACKAGES)?;
        // As the benchmarks themselves; its programs are in the folder of a release build.
        cargo(&["build", "--profile", "bench", "--package", "tortie-program"])?;
    }
    if wanted("cni") {
        let image = image::programs_with_lab()?;
        for (build, tortie) in [
            ("of the image", image.join("tortie")),
            ("with this machine's C library and allocator", release("tortie")?),
        ] {
            println!("agent and datastore {build}:");
            cni(&tortie, &image.join("tortie-cni"))?;
        }
    }
    if wanted("demo") {
        demo()?;
    }
    Ok(())
}

/// The cost of policy computation in a large cluster. The peer's published figures for the same shape of cluster are
/// printed; it is not run here.
fn calc() -> Result<()> {
    cargo(&["bench", "--quiet", "--package", "tortie-calc", "--bench", "large_cluster"])?;
    println!("peer: Antrea's controller, published for the same number of objects: 6.1 s, 1.6 GB");
    println!("goal (F9): at most 2 s and 400 MB with the objects; at most 1 ms for one label");
    Ok(())
}

/// Time of `tortie lab demo`, from start to exit.
fn demo() -> Result<()> {
    let binary = release("tortie")?;
    let folder = tempfile::tempdir()?;
    let mut seconds = Vec::new();
    for _ in 0..DEMOS {
        let begun = Instant::now();
        let output = Command::new(&binary)
            .args(["lab", "demo"])
            .env("TORTIE_LAB", folder.path().join("lab"))
            .output()?;
        if !output.status.success() {
            bail!("lab demo failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        seconds.push(begun.elapsed());
    }
    seconds.sort();
    println!(
        "lab demo, {DEMOS} runs: median {:.2} s, max {:.2} s (goal: at most 15 s)",
        seconds[DEMOS / 2].as_secs_f64(),
        seconds[DEMOS - 1].as_secs_f64()
    );
    Ok(())
}

/// CNI ADD and DEL of 100 pods, one after the other and ten at a time, by Tortie (address, interface, policy in
/// force) and by Debian's `ptp` with `host-local` (address, interface), executed in the same way.
fn cni(tortie: &Path, plugin: &Path) -> Result<()> {
    let lab = Lab::up(tortie)?;
    let agent = lab.agent_pid()?;
    let supervisor = lab.inside_pid()?;
    let plugin = Plugin {
        name: "tortie (policy in force)",
        program: plugin.to_owned(),
        config: json!({
            "cniVersion": "0.4.0", "name": "bench", "type": "tortie-cni",
            "agentSocket": lab.folder.path().join("lab/nodes/primary/cni.sock"),
            "deletionQueue": lab.folder.path().join("queue"),
        }),
        enter: vec![format!("--mount=/proc/{supervisor}/ns/mnt"), format!("--net=/proc/{agent}/ns/net")],
        mounts: Some(format!("/proc/{supervisor}/ns/mnt")),
    };
    let peer_folder = tempfile::tempdir()?;
    let peer_node = NetworkNamespace::new("tortie-bench-node", None)?;
    let peer = Plugin {
        name: "ptp + host-local",
        program: PathBuf::from("/usr/lib/cni/ptp"),
        config: json!({
            "cniVersion": "0.4.0", "name": "peer", "type": "ptp", "ipMasq": false,
            "ipam": {"type": "host-local", "dataDir": peer_folder.path(), "subnet": "10.88.0.0/16", "routes": [{"dst": "0.0.0.0/0"}]},
        }),
        enter: vec![format!("--net={}", peer_node.path())],
        mounts: None,
    };
    lab.deploy_bench_pods()?;
    println!(
        "CNI, {PODS} pods, {ROUNDS} times; each call is a process of its own, which a process on the node starts as a runtime does"
    );
    for parallel in [1, PARALLEL] {
        let ours = measure(&plugin, parallel)?;
        let theirs = measure(&peer, parallel)?;
        ours.print(plugin.name, parallel);
        theirs.print(peer.name, parallel);
        println!(
            "  ratio tortie / peer: ADD p50 {:.2}, p99 {:.2}; DEL p50 {:.2}; ADDs per second {:.1}",
            ours.add.p50() / theirs.add.p50(),
            ours.add.p99() / theirs.add.p99(),
            ours.del.p50() / theirs.del.p50(),
            ours.per_second / theirs.per_second,
        );
    }
    println!("goal (F6): ADD at most 3 ms p50 and 6 ms p99, at least 500/s ten at a time; DEL at most 5 ms");
    Ok(())
}

struct Plugin {
    name: &'static str,
    program: PathBuf,
    config: Value,
    /// The namespaces to enter, as options of nsenter.
    enter: Vec<String>,
    /// The mount namespace in which the pods' network namespaces are bound to paths, if it differs from this
    /// process's.
    mounts: Option<String>,
}

struct Measured {
    add: Times,
    del: Times,
    per_second: f64,
}

impl Measured {
    fn print(&self, name: &str, parallel: usize) {
        println!(
            "  {name}, {parallel} at a time: ADD p50 {:.2} ms, p99 {:.2} ms, {:.0}/s; DEL p50 {:.2} ms, p99 {:.2} ms",
            self.add.p50(),
            self.add.p99(),
            self.per_second,
            self.del.p50(),
            self.del.p99(),
        );
    }
}

/// Durations in milliseconds, sorted.
struct Times(Vec<f64>);

impl Times {
    fn new(durations: Vec<Duration>) -> Self {
        let mut millis: Vec<f64> = durations.iter().map(|duration| duration.as_secs_f64() * 1e3).collect();
        millis.sort_by(f64::total_cmp);
        Self(millis)
    }

    fn p50(&self) -> f64 {
        self.0[self.0.len() / 2]
    }

    /// The nearest rank: of 100 calls one is slower.
    fn p99(&self) -> f64 {
        self.0[(self.0.len() * 99).div_ceil(100).saturating_sub(1)]
    }
}

fn measure(plugin: &Plugin, parallel: usize) -> Result<Measured> {
    let (mut add, mut del, mut wall) = (Vec::new(), Vec::new(), Duration::ZERO);
    for _ in 0..ROUNDS {
        let namespaces: Result<Vec<_>> = (0..PODS)
            .map(|n| NetworkNamespace::new(&format!("tortie-bench-{n}"), plugin.mounts.as_deref()))
            .collect();
        let namespaces = namespaces?;
        let make = |verb: &str, parallel: usize| {
            let calls = Calls {
                program: plugin.program.clone(),
                config: plugin.config.clone(),
                verb: verb.to_owned(),
                namespaces: namespaces.iter().map(NetworkNamespace::path).collect(),
                parallel,
            };
            calls.make(&plugin.enter)
        };
        let added = make("ADD", parallel)?;
        wall += added.all;
        add.extend(added.each);
        del.extend(make("DEL", 1)?.each);
    }
    #[expect(clippy::cast_precision_loss, reason = "some hundred pods")]
    let per_second = (PODS * ROUNDS) as f64 / wall.as_secs_f64();
    Ok(Measured { add: Times::new(add), del: Times::new(del), per_second })
}

/// A network namespace with a path, created and removed by this run.
struct NetworkNamespace {
    name: String,
    mounts: Option<String>,
}

impl NetworkNamespace {
    fn new(name: &str, mounts: Option<&str>) -> Result<Self> {
        let namespace = Self { name: name.to_owned(), mounts: mounts.map(str::to_owned) };
        // Removes one that a killed run left.
        let _ = namespace.ip("delete").stderr(Stdio::null()).status();
        run_command(&mut namespace.ip("add"))?;
        Ok(namespace)
    }

    fn ip(&self, verb: &str) -> Command {
        let mut command = match &self.mounts {
            None => Command::new("ip"),
            Some(mounts) => {
                let mut command = Command::new("nsenter");
                command.arg(format!("--mount={mounts}")).arg("ip");
                command
            }
        };
        command.args(["netns", verb, &self.name]);
        command
    }

    fn path(&self) -> String {
        format!("/run/netns/{}", self.name)
    }
}

impl Drop for NetworkNamespace {
    fn drop(&mut self) {
        let _ = self.ip("delete").status();
    }
}

/// A lab in the background.
struct Lab {
    folder: tempfile::TempDir,
    child: Child,
}

impl Lab {
    fn up(tortie: &Path) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let child = Command::new(tortie)
            .args(["lab", "up", "--windows", "0"])
            .env("TORTIE_LAB", folder.path().join("lab"))
            .stderr(Stdio::null())
            .spawn()?;
        let lab = Self { folder, child };
        let deadline = Instant::now() + Duration::from_secs(30);
        while !lab.folder.path().join("lab/nodes/primary/cni.sock").exists() {
            if Instant::now() > deadline {
                bail!("the lab does not come up");
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(lab)
    }

    /// The pid of the first process inside the lab.
    fn inside_pid(&self) -> Result<String> {
        Ok(fs::read_to_string(self.folder.path().join("lab/pid"))?.trim().to_owned())
    }

    /// The pid of the agent, which runs in the node's network namespace.
    fn agent_pid(&self) -> Result<String> {
        let folder = self.folder.path().display().to_string();
        for entry in fs::read_dir("/proc")?.flatten() {
            let command = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let command = String::from_utf8_lossy(&command);
            if command.contains(&folder) && command.contains("\0agent\0") {
                return Ok(entry.file_name().to_string_lossy().into_owned());
            }
        }
        bail!("the lab's agent is not running")
    }

    /// Pods for the plugin, on a node without a runtime, so that only this benchmark adds them.
    fn deploy_bench_pods(&self) -> Result<()> {
        let mut manifests = String::new();
        for number in 0..PODS {
            let pod = json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": format!("bench-{number}"), "labels": {"app": "bench"}},
                "spec": {"nodeSelector": {"bench": "none"}, "containers": [{"name": "c"}]},
            });
            manifests += &format!("{pod}\n---\n");
        }
        // A policy that selects all of them, so that there is something to put in force.
        manifests += &json!({
            "apiVersion": "projectcalico.org/v3", "kind": "NetworkPolicy", "metadata": {"name": "bench"},
            "spec": {"selector": "app == 'bench'", "ingress": [{"action": "Allow", "protocol": "TCP", "source": {"selector": "app == 'bench'"}, "destination": {"ports": [80]}}]},
        })
        .to_string();
        let file = self.folder.path().join("bench.yml");
        fs::write(&file, manifests)?;
        let mut apply = Command::new(release("tortie")?);
        apply
            .args(["apply", "-f"])
            .arg(&file)
            .env("TORTIE_LAB", self.folder.path().join("lab"))
            .stdout(Stdio::null());
        run_command(&mut apply)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let _ = self.child.wait();
    }
}

fn release(name: &str) -> Result<PathBuf> {
    let path = target_folder(metadata()?)?.join("release").join(name);
    if !path.exists() {
        bail!("{} was not built", path.display());
    }
    Ok(path)
}

/// Asks cargo for the workspace as it is built.
fn metadata() -> Result<Command> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["metadata", "--no-deps", "--format-version", "1"]).current_dir(workspace()?);
    Ok(command)
}

/// The folder that cargo builds in, which CARGO_TARGET_DIR and cargo's configuration may set.
fn target_folder(mut metadata: Command) -> Result<PathBuf> {
    let output = metadata.output()?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let folder = metadata["target_directory"].as_str();
    Ok(PathBuf::from(folder.context("cargo metadata names no target_directory")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binaries_are_found_in_cargo_target_dir() {
        let mut command = metadata().unwrap();
        command.env("CARGO_TARGET_DIR", "/elsewhere");
        assert_eq!(target_folder(command).unwrap(), PathBuf::from("/elsewhere"));
        let mut command = metadata().unwrap();
        command.env_remove("CARGO_TARGET_DIR");
        assert_eq!(target_folder(command).unwrap(), workspace().unwrap().join("target"));
    }
}
