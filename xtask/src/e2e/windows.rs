//! A Windows node beside the Linux nodes: HNS is emulated, its agent is the one of Windows nodes, and a stand-in of the lab replaces
//! its kubelet, its container runtime and its kube-proxy.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use anyhow::{Context as _, Result, bail};
use tortie_lab::{JoinedNode, Joining, LabDir};
use tortie_servers::cluster::image::AGNHOST;

use super::{Folder, NODES, finish, kubectl, kubectl_command, tortie_command, tortie_program, wait_until};

/// The name of the node.
pub(super) const NODE: &str = "gamma";
/// The user of its agent, and the group that [`OBJECTS`] gives an agent's permissions.
pub(super) const AGENT: &str = "tortie-node-gamma";
pub(super) const AGENTS: &str = "tortie:nodes";

const OBJECTS: &str = include_str!("windows.yaml");
const POLICIES: &str = include_str!("windows-policies.yaml");
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
/// How long a client on a Linux node waits for an answer, in seconds.
const PATIENCE: &str = "2";
/// curl's exit code for a time that has passed.
const TIMED_OUT: i32 = 28;
/// How often the verdicts are compared again when they are as they should be.
const ROUNDS: usize = 1;

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
    let world = World::read()?;
    println!("==> without policy, all pods reach each other, and both Services");
    world.settles(node, |_, _| true)?;
    println!("==> the hostPort of a pod of the Windows node leads to it");
    let to = (world.windows_node, HOST_PORT);
    let verdict = by_curl("linux-a", to, "windows-b")?;
    if verdict != REACHED {
        bail!("linux-a -> {to:?}: {verdict}");
    }
    println!("==> with policy, what it denies is cut in both directions, and the rest is not");
    apply(POLICIES)?;
    world.settles(node, allowed)?;
    println!("==> the pods go, and HNS has no endpoint of them");
    kubectl(&["delete", "namespace", NAMESPACE, "--timeout=120s"])?;
    wait_until("HNS has no endpoints of pods", || Ok(node.ask("endpoints")? == "0"))
}

/// What `windows-policies.yaml` allows: the servers `b` accept only the clients `a`, of either system; the pods `closed` may
/// connect to nobody and accept anybody.
fn allowed(from: &str, to: &str) -> bool {
    from == to || (!from.ends_with("closed") && (!to.ends_with("-b") || from.ends_with("-a")))
}

/// The addresses of pods and Services.
struct World {
    pods: BTreeMap<String, Ipv4Addr>,
    services: BTreeMap<String, Ipv4Addr>,
    /// The address of the Windows node.
    windows_node: Ipv4Addr,
}

impl World {
    fn read() -> Result<Self> {
        let pods = table("pods", "{.metadata.name} {.spec.nodeName} {.status.podIP} {.status.hostIP}")?;
        for (pod, node) in PODS {
            if !pods.iter().any(|row| row[0] == pod && row[1] == node) {
                bail!("{pod} should be on {node}: {pods:?}");
            }
        }
        let address = |row: &Vec<String>, column: usize| Ok((row[0].clone(), row[column].parse()?));
        let on_windows = pods.iter().find(|row| row[1] == NODE).context("no pod is on the Windows node")?;
        let services = table("services", "{.metadata.name} {.spec.clusterIP}")?;
        Ok(Self {
            pods: pods.iter().map(|row| address(row, 2)).collect::<Result<_>>()?,
            windows_node: on_windows[3].parse()?,
            services: services.iter().map(|row| address(row, 1)).collect::<Result<_>>()?,
        })
    }

    /// Waits until all verdicts are those of `allowed`, and demands that they stay so.
    fn settles(&self, node: &mut Remote, allowed: impl Fn(&str, &str) -> bool) -> Result<()> {
        let mut wrong = Vec::new();
        let settled = wait_until("the verdicts are as they should be", || {
            wrong = self.wrong(node, &allowed)?;
            Ok(wrong.is_empty())
        });
        settled.with_context(|| format!("wrong verdicts:\n{}", wrong.join("\n")))?;
        for _ in 0..ROUNDS {
            let wrong = self.wrong(node, &allowed)?;
            if !wrong.is_empty() {
                bail!("verdicts were right, and are wrong now:\n{}", wrong.join("\n"));
            }
        }
        Ok(())
    }

    /// The connections whose verdict is wrong: from each pod to each other one, and to each Service.
    fn wrong(&self, node: &mut Remote, allowed: &impl Fn(&str, &str) -> bool) -> Result<Vec<String>> {
        let mut wrong = Vec::new();
        for (from, on) in PODS {
            let pods = self.pods.iter().map(|(pod, address)| (pod, pod.as_str(), address));
            let services = self.services.iter().filter_map(|(service, address)| {
                let (_, pod) = SERVICES.into_iter().find(|(name, _)| name == service)?;
                Some((service, pod, address))
            });
            for (name, pod, address) in pods.chain(services) {
                // A Service does not lead back to its own client everywhere.
                if pod == from {
                    continue;
                }
                let verdict = match on {
                    NODE => node.ask(&format!("probe {from} {address}:{PORT} {pod}"))?,
                    _ => by_curl(from, (*address, PORT), pod)?,
                };
                let expected = if allowed(from, pod) { REACHED } else { CUT };
                if verdict != expected {
                    wrong.push(format!("{from} -> {name} ({address}): {verdict}, not {expected}"));
                }
            }
        }
        Ok(wrong)
    }
}

/// The verdicts as the lab's probes name them.
const REACHED: &str = "Reached";
const CUT: &str = "Cut";

/// A connection from a pod of a Linux node. The page must name the pod that serves it.
fn by_curl(from: &str, (address, port): (Ipv4Addr, u16), server: &str) -> Result<String> {
    let (namespace, url) = (format!("--namespace={NAMESPACE}"), format!("http://{address}:{port}/"));
    let output = kubectl_command(&[
        "exec",
        from,
        &namespace,
        "--",
        "curl",
        "--silent",
        "--show-error",
        "--max-time",
        PATIENCE,
        &url,
    ])?
    .output()?;
    let (page, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let timed_out = errors.contains(&format!("exit code {TIMED_OUT}"));
    Ok(match output.status.success() {
        true if page.contains(server) => REACHED.to_owned(),
        true => format!("another page: {page:?}"),
        false if timed_out => CUT.to_owned(),
        false => errors.trim().replace('\n', " "),
    })
}

/// Objects of the namespace, with these fields.
fn table(kind: &str, fields: &str) -> Result<Vec<Vec<String>>> {
    let template = format!("jsonpath={{range .items[*]}}{fields}{{\"\\n\"}}{{end}}");
    // The fields in the template are separated by blanks.
    let template = template.replace("} {", "}{\" \"}{");
    let namespace = format!("--namespace={NAMESPACE}");
    let output = kubectl_command(&["get", kind, &namespace, "-o", &template])?.output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let width = fields.split(' ').count();
    let rows: Vec<Vec<String>> =
        text.lines().map(|line| line.split(' ').map(str::to_owned).collect()).collect();
    if !output.status.success() || rows.is_empty() || rows.iter().any(|row: &Vec<String>| row.len() != width)
    {
        bail!("kubectl get {kind}: {text:?} {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(rows)
}

fn apply(text: &str) -> Result<()> {
    with_file(text, |file| kubectl(&["apply", "--filename", file]))
}

fn delete(text: &str) -> Result<()> {
    with_file(text, |file| kubectl(&["delete", "--ignore-not-found", "--filename", file, "--timeout=120s"]))
}

fn with_file(text: &str, work: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    let file = tempfile::NamedTempFile::with_suffix(".yaml")?;
    std::fs::write(file.path(), text.replace("AGNHOST", AGNHOST))?;
    work(&file.path().display().to_string())
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
