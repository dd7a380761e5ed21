//! Other programs that change the kernel's tables of a node: kube-proxy in its modes, firewalld, and Docker. Pods must connect as
//! policy says while they run, and the node report must name what drops packets of pods.

use std::net::SocketAddrV4;
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use tortie_servers::cluster::UNDERLAY_INTERFACE;

use super::connections::{
    Target, allowed, apply, apply_policies, by_curl, delete, delete_policies, settle, table,
};
use super::{
    Folder, NODES, PODS as POOL, finish, kubectl, node_command, restart, tortie_command, wait_until,
};
use setup::packages;

const OBJECTS: &str = include_str!("coexist.yaml");
const NAMESPACE: &str = "beside";
const CLIENTS: [&str; 6] = ["alpha-a", "alpha-b", "alpha-closed", "beta-a", "beta-b", "beta-closed"];
const PORT: u16 = 8080;
/// The port of each node that leads to its pod `b`.
const HOST_PORT: u16 = 8088;
/// The condition that names other programs' chains.
const CONDITION: &str = "ForeignChainMayDrop";

/// A program of the machine that runs on each node.
struct Program {
    name: &'static str,
    /// Starts it, and waits until its rules are there.
    start: &'static str,
    stop: &'static str,
    /// What the remedy of the condition says, with POOL, API and the node's interface filled in.
    remedy: &'static str,
    /// The parts of the conditions that `tortie status` shows for each node while the program runs: the table that drops packets,
    /// and the remedy.
    named: [&'static [&'static str]; 2],
}

const FIREWALLD: Program = Program {
    name: "firewalld",
    start: "mkdir -p /run/dbus; test -e /run/dbus/pid || dbus-daemon --system --fork
        setsid firewalld --nofork --nopid >/var/log/firewalld.out 2>&1 </dev/null & echo $! >/run/firewalld.number
        until firewall-cmd --state >/dev/null 2>&1; do kill -0 $(cat /run/firewalld.number); sleep 0.1; done",
    stop: "kill $(cat /run/firewalld.number)
        while nft list table inet firewalld >/dev/null 2>&1; do sleep 0.1; done",
    remedy: "firewall-cmd --quiet --zone=trusted --add-source=POOL
        firewall-cmd --quiet --add-port=4789/udp --add-port=10250/tcp",
    named: [&["table inet firewalld", "chain filter_FORWARD", "firewall-cmd"]; 2],
};

const DOCKER: Program = Program {
    name: "Docker",
    // dockerd sets the policy DROP if it finds forwarding off, as at most boots. Here it finds a file in the kernel's place, because
    // Tortie's agent turns forwarding on again at any time.
    start: "echo 0 >/run/ip_forward
        setsid unshare --mount sh -ec 'mount --bind /run/ip_forward /proc/sys/net/ipv4/ip_forward
            exec dockerd --data-root=/var/lib/docker --exec-root=/run/docker-exec --pidfile=/run/docker.number \
                --host=unix:///run/docker.sock --containerd=/run/containerd/containerd.sock --storage-driver=vfs' \
            >/var/log/dockerd.out 2>&1 </dev/null & number=$!
        until docker version >/dev/null 2>&1; do kill -0 $number; sleep 0.1; done",
    // Docker leaves its rules.
    stop: "kill $(cat /run/docker.number); while test -e /run/docker.number; do sleep 0.1; done
        for table in filter nat; do
            iptables-save -t $table | grep -v -i docker | sed 's/^:FORWARD DROP/:FORWARD ACCEPT/' | iptables-restore -T $table
        done
        ip link delete docker0",
    remedy: "iptables -I DOCKER-USER -s POOL -j ACCEPT; iptables -I DOCKER-USER -d POOL -j ACCEPT",
    named: [
        &["table ip filter", "chain FORWARD (hook forward, priority 0): its policy drops", "DOCKER-USER"],
        &["legacy table iptables filter", "chain FORWARD (hook forward, priority 0): its policy drops", "DOCKER-USER"],
    ],
};

/// Runs all of it. `iptables` of the first node writes nftables, that of the second one the legacy tables.
pub(super) fn run(folder: &Folder) -> Result<()> {
    packages::install(&packages::COEXIST_PACKAGES)?;
    choose_iptables("iptables-legacy")?;
    // A run that failed has left its pods and policies.
    delete(OBJECTS)?;
    apply(OBJECTS)?;
    let outcome = all(folder);
    // The cluster may be used for something else afterwards.
    let restored = kube_proxy(folder, "nftables").and_then(|()| choose_iptables("iptables-nft"));
    outcome.and(restored).and_then(|()| delete(OBJECTS))
}

fn all(folder: &Folder) -> Result<()> {
    let namespace = format!("--namespace={NAMESPACE}");
    kubectl(&["wait", "pods", "--all", &namespace, "--for=condition=Ready", "--timeout=120s"])?;
    case("kube-proxy by nftables", pods_connect_as_policy_says)?;
    case("firewalld, with kube-proxy by nftables", || beside(&FIREWALLD))?;
    case("Docker, with kube-proxy by nftables", || beside(&DOCKER))?;
    case("kube-proxy by iptables", || {
        kube_proxy(folder, "iptables")?;
        pods_connect_as_policy_says()?;
        drops_are_named(None)
    })?;
    case("firewalld, with kube-proxy by iptables", || beside(&FIREWALLD))?;
    case("Docker, with kube-proxy by iptables", || beside(&DOCKER))?;
    if !has_ipvs()? {
        println!("==> kube-proxy by IPVS: not applicable, because the kernel has no IPVS (/proc/net/ip_vs)");
        return Ok(());
    }
    case("kube-proxy by IPVS", || {
        kube_proxy(folder, "ipvs")?;
        pods_connect_as_policy_says()?;
        drops_are_named(None)
    })
}

fn case(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let started = Instant::now();
    println!("==> {name}");
    work().with_context(|| name.to_owned())?;
    println!("    as it should be, after {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// The program drops packets of pods, a condition names that with its remedy, and the remedy helps. When the program is gone,
/// the condition is, too.
fn beside(program: &Program) -> Result<()> {
    on_each_node(program.start)?;
    let outcome = while_it_runs(program);
    on_each_node(program.stop)?;
    outcome?;
    println!("    without {}, the condition is gone, and pods connect as policy says", program.name);
    drops_are_named(None)?;
    pods_connect_as_policy_says()
}

fn while_it_runs(program: &Program) -> Result<()> {
    println!("    {} drops packets from a node to a pod of another one", program.name);
    wait_until("packets are dropped", || Ok(!node_reaches_pod()?))?;
    println!("    tortie status names it, and its remedy:");
    drops_are_named(Some(program))?;
    println!("    with the remedy, pods connect as policy says");
    on_each_node(program.remedy)?;
    pods_connect_as_policy_says()
}

/// Whether the first node reaches a pod of the second one.
fn node_reaches_pod() -> Result<bool> {
    let pods = table(NAMESPACE, "pods", "{.metadata.name} {.status.podIP}")?;
    let pod = pods.iter().find(|row| row[0] == "beta-closed").context("beta-closed does not exist")?;
    let url = format!("http://{}:{PORT}/", pod[1]);
    Ok(node_command(NODES[0], &["curl", "--silent", "--max-time", "2", &url])?.output()?.status.success())
}

/// `tortie status` names the chains of this program that drop, and no others.
fn drops_are_named(program: Option<&Program>) -> Result<()> {
    let mut screen = String::new();
    let named = wait_until("tortie status names what drops packets, and nothing else", || {
        screen = String::from_utf8_lossy(&tortie_command(&["status"])?.output()?.stdout).into_owned();
        let conditions = |node: &str| -> Vec<&str> {
            let start = format!("node {node}: {CONDITION}: ");
            screen.lines().filter(|line| line.contains(&start)).collect()
        };
        Ok(NODES.into_iter().enumerate().all(|(number, node)| match program {
            None => conditions(node).is_empty(),
            Some(program) => conditions(node)
                .iter()
                .any(|line| program.named[number].iter().all(|part| line.contains(part))),
        }))
    });
    named.with_context(|| screen.clone())?;
    screen.lines().filter(|line| line.contains(CONDITION)).for_each(|line| println!("      {line}"));
    Ok(())
}

/// Pods of both nodes connect to pods, to Services and to ports of nodes: all of them without policy, and as policy says with it.
fn pods_connect_as_policy_says() -> Result<()> {
    let targets = targets()?;
    let mut verdicts = |from: &str, targets: &[&Target]| by_curl(NAMESPACE, from, targets);
    settle(&CLIENTS, &targets, &mut verdicts, &|_, _| true)?;
    apply_policies(NAMESPACE)?;
    // To another node, a packet has the address of its own node (`natOutgoing`), which the policies admit to no server.
    let is_hidden =
        |from: &str, target: &Target| target.to.port() == HOST_PORT && !target.pod.starts_with(node_of(from));
    let outcome = settle(&CLIENTS, &targets, &mut verdicts, &|from, target| {
        allowed(from, &target.pod) && !is_hidden(from, target)
    });
    delete_policies(NAMESPACE).and(outcome)
}

/// The node whose pod this is.
fn node_of(pod: &str) -> &str {
    pod.split('-').next().unwrap_or(pod)
}

fn targets() -> Result<Vec<Target>> {
    let pods = table(NAMESPACE, "pods", "{.metadata.name} {.status.podIP} {.status.hostIP}")?;
    let services = table(NAMESPACE, "services", "{.metadata.name} {.spec.clusterIP}")?;
    let target = |name: String, pod: &str, address: &str, port| -> Result<Target> {
        Ok(Target { name, to: SocketAddrV4::new(address.parse()?, port), pod: pod.to_owned() })
    };
    let mut targets = Vec::new();
    for row in &pods {
        targets.push(target(row[0].clone(), &row[0], &row[1], PORT)?);
        if row[0].ends_with("-b") {
            targets.push(target(format!("hostPort of {}", node_of(&row[0])), &row[0], &row[2], HOST_PORT)?);
        }
    }
    for row in &services {
        let node = row[0].strip_prefix("to-").context("a Service is named to-NODE")?;
        targets.push(target(row[0].clone(), &format!("{node}-b"), &row[1], PORT)?);
    }
    Ok(targets)
}

/// Runs a script on each node.
fn on_each_node(script: &str) -> Result<()> {
    let script = script.replace("POOL", POOL).replace("INTERFACE", UNDERLAY_INTERFACE);
    for node in NODES {
        let output = node_command(node, &["sh", "-ec", &script])?.output()?;
        if !output.status.success() {
            let printed = [output.stdout, output.stderr].concat();
            bail!("{node}: {script}: {}", String::from_utf8_lossy(&printed).trim());
        }
    }
    Ok(())
}

/// Chooses the program that is `iptables` on the second node. The choice is in the node's own files.
fn choose_iptables(program: &str) -> Result<()> {
    finish(&mut node_command(
        NODES[1],
        &["update-alternatives", "--set", "iptables", &format!("/usr/sbin/{program}")],
    )?)
}

/// Restarts kube-proxy on each node in this mode, and waits until its rules are there and those of the mode before are not.
fn kube_proxy(folder: &Folder, mode: &str) -> Result<()> {
    let running = folder.running()?;
    let place = running.kubeconfig.parent().context("the kubeconfig is in no folder")?;
    for node in NODES {
        let file = place.join(node).join("kube-proxy.yaml");
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let lines = text.lines().map(|line| match line.starts_with("mode: ") {
            true => format!("mode: {mode}\n"),
            false => format!("{line}\n"),
        });
        std::fs::write(&file, lines.collect::<String>())?;
        restart(node, "kube-proxy")?;
    }
    let rules = match mode {
        "iptables" => {
            "iptables-save -t nat | grep -q KUBE-SVC- && ! nft list table ip kube-proxy 2>/dev/null"
        }
        "ipvs" => "grep -q rr /proc/net/ip_vs && ! nft list table ip kube-proxy 2>/dev/null",
        _ => "nft list table ip kube-proxy | grep -q service- && ! iptables-save -t nat | grep KUBE-SVC-",
    };
    wait_until("kube-proxy has its rules, and nothing is left of the mode before", || {
        let has_rules = |node| Ok(node_command(node, &["sh", "-c", rules])?.output()?.status.success());
        NODES.into_iter().map(has_rules).try_fold(true, |all, has: Result<bool>| Ok(all && has?))
    })
}

/// Asks the kernel.
fn has_ipvs() -> Result<bool> {
    let ask = "modprobe ip_vs 2>/dev/null || true; test -e /proc/net/ip_vs";
    Ok(node_command(NODES[0], &["sh", "-c", ask])?.status()?.success())
}
