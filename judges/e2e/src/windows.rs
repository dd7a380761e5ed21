//! A Windows node beside the Linux nodes: HNS is emulated, its agent is the one of Windows nodes, and a stand-in of the lab replaces
//! its kubelet, its container runtime and its kube-proxy.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, SocketAddrV4};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use anyhow::{Context as _, Result, bail};
use tortie_lab::{JoinedNode, Joining, LabDir};

use super::connections::{Target, allowed, apply, apply_policies, by_curl, delete, settle, table};
use super::{Folder, NODES, finish, kubectl, tortie_command, tortie_program, wait_until};

/// The name of the node.
pub(super) const NODE: &str = "gamma";
/// The user of its agent, and the group that [`OBJECTS`] gives an agent's permissions.
pub(super) const AGENT: &str = "tortie-node-gamma";
pub(super) const AGENTS: &str = "tortie:nodes";

const OBJECTS: &str = include_str!("windows.yaml");
const NAMESPACE: &str = "mixed";
/// The pods, each with the node that its selectors lead to.
const PODS: [(&str, &str); 6] = [
    ("linux-a", NODES[0]),
    ("linux-b", NODES[1]),
    ("linux-closed", NODES[0]),
    ("windows-a", NODE),
    ("windows-b", NODE),
    ("windows-closed", NODE),
];
/// The Services, and the pod behind each.
const SERVICES: [(&str, &str); 2] = [("to-linux", "linux-b"), ("to-windows", "windows-b")];
const PORT: u16 = 8080;
/// The port of the Windows node that leads to `windows-b`.
const HOST_PORT: u16 = 8088;
/// Lets the node join, and asks for verdicts by connections. Then the node and its pods go.
pub(super) fn run(folder: &Folder) -> Result<()> {
    let outcome = joined(folder);
    if outcome.is_err() {
        let log = folder.file(LOG);
        eprintln!(
            "the log of the node is {}, those of its programs are in {NODE}/logs beside it",
            log.display()
        );
    }
    // Without the node, its pods go by themselves.
    let removed = kubectl(&["delete", "node", NODE, "--ignore-not-found"]).and_then(|()| delete(OBJECTS));
    outcome.and(removed).and_then(|()| set_strict_affinity(false))
}

fn joined(folder: &Folder) -> Result<()> {
    // Agents of Windows nodes do not start without it.
    set_strict_affinity(true)?;
    // A run that failed has left its pods and policies.
    delete(OBJECTS)?;
    apply(OBJECTS)?;
    scenario(&mut Remote::start(folder)?)
}

fn set_strict_affinity(value: bool) -> Result<()> {
    finish(&mut tortie_command(&["ipam", "configure", &format!("--strict-affinity={value}")])?)
}

fn scenario(node: &mut Remote) -> Result<()> {
    kubectl(&["wait", "node", NODE, "--for=condition=Ready", "--timeout=60s"])?;
    let namespace = format!("--namespace={NAMESPACE}");
    kubectl(&["wait", "pods", "--all", &namespace, "--for=condition=Ready", "--timeout=120s"])?;
    let pods = pods()?;
    let (targets, host_port) = (targets(&pods)?, host_port(&pods)?);
    let clients = PODS.map(|(pod, _)| pod);
    let mut verdicts = |from: &str, targets: &[&Target]| verdicts(node, from, targets);
    println!("==> without policy, all pods reach each other, and both Services");
    settle(&clients, &targets, &mut verdicts, &|_, _| true)?;
    println!("==> the hostPort of a pod of the Windows node leads to it");
    settle(&["linux-a", "linux-b"], &[host_port], &mut verdicts, &|_, _| true)?;
    println!("==> with policy, what it denies is cut in both directions, and the rest is not");
    apply_policies(NAMESPACE)?;
    settle(&clients, &targets, &mut verdicts, &|from, target| allowed(from, &target.pod))?;
    println!("==> the pods go, and HNS has no endpoint of them");
    kubectl(&["delete", "namespace", NAMESPACE, "--timeout=120s"])?;
    wait_until("HNS has no endpoints of pods", || Ok(node.ask("endpoints")? == "0"))
}

/// The pods: name, node, address, and the node's address.
fn pods() -> Result<Vec<Vec<String>>> {
    let pods =
        table(NAMESPACE, "pods", "{.metadata.name} {.spec.nodeName} {.status.podIP} {.status.hostIP}")?;
    for (pod, node) in PODS {
        if !pods.iter().any(|row| row[0] == pod && row[1] == node) {
            bail!("{pod} should be on {node}: {pods:?}");
        }
    }
    Ok(pods)
}

/// The pods and the Services.
fn targets(pods: &[Vec<String>]) -> Result<Vec<Target>> {
    let target = |name: &str, pod: &str, address: &str| -> Result<Target> {
        Ok(Target {
            name: name.to_owned(),
            to: SocketAddrV4::new(address.parse()?, PORT),
            pod: pod.to_owned(),
        })
    };
    let mut targets: Vec<Target> =
        pods.iter().map(|row| target(&row[0], &row[0], &row[2])).collect::<Result<_>>()?;
    for row in table(NAMESPACE, "services", "{.metadata.name} {.spec.clusterIP}")? {
        let found = SERVICES.into_iter().find(|(name, _)| *name == row[0]);
        let (_, pod) = found.with_context(|| format!("Service {} has no pod", row[0]))?;
        targets.push(target(&row[0], pod, &row[1])?);
    }
    Ok(targets)
}

/// The port of the Windows node that leads to a pod.
fn host_port(pods: &[Vec<String>]) -> Result<Target> {
    let on_windows = pods.iter().find(|row| row[1] == NODE).context("no pod is on the Windows node")?;
    let to = SocketAddrV4::new(on_windows[3].parse()?, HOST_PORT);
    Ok(Target { name: format!("hostPort of {NODE}"), to, pod: "windows-b".to_owned() })
}

/// Connects from a pod to targets.
fn verdicts(node: &mut Remote, from: &str, targets: &[&Target]) -> Result<Vec<String>> {
    if !PODS.contains(&(from, NODE)) {
        return by_curl(NAMESPACE, from, targets);
    }
    let ask = |target: &&Target| node.ask(&format!("probe {from} {} {}", target.to, target.pod));
    targets.iter().map(ask).collect()
}

/// The log of the node's process, in the folder of the cluster.
const LOG: &str = "gamma.log";

/// The process of the node. It ends when its standard input does.
struct Remote {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Remote {
    fn start(folder: &Folder) -> Result<Self> {
        let program = tortie_program()?;
        let mut command = folder.command()?;
        command.arg(std::env::current_exe()?).args(["e2e", "windows-node"]).arg(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(folder.file(LOG))?);
        let mut child = command.spawn().context("starting the Windows node")?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("the node has no output")?);
        let mut node = Self { child, input, output };
        let answer = node.answer()?;
        if answer != "ready" {
            let log = std::fs::read_to_string(folder.file(LOG))?;
            bail!("the Windows node did not start: {answer}\n{log}");
        }
        Ok(node)
    }

    fn ask(&mut self, question: &str) -> Result<String> {
        let input = self.input.as_mut().context("the node has no input")?;
        writeln!(input, "{question}").context("the Windows node has ended")?;
        self.answer()
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// Runs the node in the namespaces of the cluster, and answers questions, one on each line.
pub(super) fn serve(program: &str) -> Result<()> {
    tortie_lab::enter_inside()?;
    let folder = Folder::new();
    let running = folder.running_inside()?;
    let joining = Joining {
        name: NODE.to_owned(),
        number: NODES.len(),
        program: PathBuf::from(program),
        kubelet: running.of_windows_kubelet,
        agent: running.of_windows_agent,
    };
    let runtime = tokio::runtime::Runtime::new()?;
    let dir = LabDir::new(Some(folder.file(NODE)));
    let node = runtime.block_on(JoinedNode::start(dir, &joining))?;
    println!("ready");
    for line in std::io::stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split(' ').collect();
        let answer = match words[..] {
            ["probe", pod, to, expect] => {
                let to: SocketAddr = to.parse()?;
                runtime.block_on(node.probe(NAMESPACE, pod, to, expect))
            }
            ["endpoints"] => runtime.block_on(node.endpoints())?.to_string(),
            _ => bail!("{line:?} is no question"),
        };
        println!("{answer}");
    }
    runtime.block_on(node.stop());
    Ok(())
}
