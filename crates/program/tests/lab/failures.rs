//! Agents that die and an HNS that hangs: what continues, and what recovers.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tortie_hcn::{Address, HcnExt, RemoteHcn};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::nftables::Nft;
use tortie_kernel::route::RouteSocket;

use crate::support::{self, Lab, Process, User, leftovers};
use crate::{Cells, cells};

/// The timeout of a new connection, in which the first packet may be lost once.
const TIMEOUT: Duration = Duration::from_millis(2_500);
/// The interval of sending.
const PACE: Duration = Duration::from_millis(20);

fn matrix(lab: &Lab) -> Cells {
    cells(&lab.json(&["lab", "matrix", "-o", "json", "--port", "80"]))
}

fn processes(lab: &Lab, part: &str) -> Vec<Process> {
    lab.processes().into_iter().filter(|process| process.command.contains(part)).collect()
}

fn netns_of(lab: &Lab, part: &str) -> NetNs {
    let process = processes(lab, part).pop().unwrap_or_else(|| panic!("no process has {part:?}"));
    NetNs::open(Path::new(&format!("/proc/{}/ns/net", process.pid))).unwrap()
}

fn signal(process: &Process, signal: Signal) {
    kill_process(Pid::from_raw(process.pid as i32).unwrap(), signal).unwrap();
}

/// Connections from one pod to another, until stopped.
struct Traffic {
    what: String,
    end: Arc<AtomicBool>,
    thread: JoinHandle<Vec<String>>,
}

impl Traffic {
    fn start(
        lab: &Lab,
        what: &str,
        from: &str,
        to: &str,
        work: fn(SocketAddr) -> Result<(), String>,
    ) -> Self {
        let pod = lab.json(&["get", "pods", "-n", "calico-demo", to, "-o", "json"]);
        let address: IpAddr = pod["status"]["podIP"].as_str().unwrap().parse().unwrap();
        let netns = netns_of(lab, &format!("tortie-pod calico-demo/{from} "));
        let end = Arc::new(AtomicBool::new(false));
        let ended = end.clone();
        let thread = std::thread::spawn(move || {
            let go_on = || !ended.load(Ordering::Relaxed);
            let all = || {
                let mut outcomes = Vec::new();
                while go_on() {
                    outcomes.push(work((address, 80).into()).err().unwrap_or_default());
                    std::thread::sleep(PACE);
                }
                outcomes
            };
            netns.run(all).unwrap()
        });
        Self { what: format!("{what}, {from} -> {to}"), end, thread }
    }

    /// The errors of all attempts; an empty entry is a success.
    fn check(self) {
        self.end.store(true, Ordering::Relaxed);
        let outcomes = self.thread.join().unwrap();
        let bad: Vec<_> = outcomes.iter().filter(|outcome| !outcome.is_empty()).collect();
        assert!(bad.is_empty() && outcomes.len() > 3, "{}: of {} tries: {bad:?}", self.what, outcomes.len());
    }
}

/// A new connection that must succeed.
fn reaches(to: SocketAddr) -> Result<(), String> {
    let fetch = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&to, TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.write_all(b"GET / HTTP/1.0\r\n\r\n")?;
        let mut page = String::new();
        stream.read_to_string(&mut page)?;
        Ok(page)
    };
    match fetch() {
        Ok(page) if page.contains("-server") => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

/// A new connection that must fail.
fn is_denied(to: SocketAddr) -> Result<(), String> {
    match TcpStream::connect_timeout(&to, Duration::from_millis(200)) {
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

/// An established connection: one request, whose lines are sent one by one until stopped.
struct Request {
    end: Arc<AtomicBool>,
    thread: JoinHandle<std::io::Result<String>>,
}

impl Request {
    fn start(lab: &Lab, from: &str, to: &str) -> Self {
        let pod = lab.json(&["get", "pods", "-n", "calico-demo", to, "-o", "json"]);
        let address: IpAddr = pod["status"]["podIP"].as_str().unwrap().parse().unwrap();
        let netns = netns_of(lab, &format!("tortie-pod calico-demo/{from} "));
        let mut stream =
            netns.run(|| TcpStream::connect_timeout(&(address, 80).into(), TIMEOUT)).unwrap().unwrap();
        let end = Arc::new(AtomicBool::new(false));
        let ended = end.clone();
        let thread = std::thread::spawn(move || {
            stream.set_read_timeout(Some(TIMEOUT))?;
            stream.write_all(b"GET / HTTP/1.0\r\n")?;
            while !ended.load(Ordering::Relaxed) {
                stream.write_all(b"Still: there\r\n")?;
                std::thread::sleep(PACE);
            }
            stream.write_all(b"\r\n")?;
            let mut page = String::new();
            stream.read_to_string(&mut page)?;
            Ok(page)
        });
        Self { end, thread }
    }

    fn check(self) {
        self.end.store(true, Ordering::Relaxed);
        let page = self.thread.join().unwrap().unwrap();
        assert!(page.contains("-server"), "{page}");
    }
}

/// The objects of the nodes' pods: links by index, routes and rules; networks and endpoints by identifier, with ACLs.
fn objects(lab: &Lab, linux: &NetNs) -> String {
    let linux = linux.run(|| {
        let mut socket = RouteSocket::open().unwrap();
        let links: Vec<_> = socket.links().unwrap().into_iter().map(|link| (link.index, link.name)).collect();
        (links, socket.routes().unwrap(), Nft::open().unwrap().list("tortie").unwrap())
    });
    let hns = RemoteHcn::new(Address::Unix(lab.dir().join("nodes/minion/hns.sock")), Duration::from_secs(5));
    let networks = hns.networks().unwrap();
    let of = |network: &tortie_hcn::schema::Network| hns.endpoints_of_network(network.id).unwrap();
    let endpoints: Vec<_> = networks.iter().map(of).collect();
    format!("{linux:#?}\n{networks:#?}\n{endpoints:#?}")
}

/// Traffic continues while the agents are down; they are restarted, find their objects, and apply what changed
/// meanwhile.
#[test]
fn a_killed_agent_cuts_no_connection_and_restarts() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[]);
    lab.ok(&["apply", "-f", &lab.example("policy-demo-pods.yml")]);
    lab.wait_for_pods();
    lab.ok(&["apply", "--wait", "-f", &lab.example("policy-demo-policy.yml")]);
    let before = matrix(&lab);
    let primary = netns_of(&lab, "agent --node primary");
    let objects_before = objects(&lab, &primary);
    let established = [
        Request::start(&lab, "linux-client", "windows-server"),
        Request::start(&lab, "windows-client", "linux-server"),
    ];
    let traffic = [
        Traffic::start(&lab, "allowed", "linux-client", "windows-server", reaches),
        Traffic::start(&lab, "allowed", "windows-client", "linux-server", reaches),
        Traffic::start(&lab, "allowed", "linux-client", "linux-server", reaches),
        Traffic::start(&lab, "denied", "windows-client", "windows-server", is_denied),
        Traffic::start(&lab, "denied", "linux-server", "windows-server", is_denied),
    ];

    let hns = processes(&lab, "tortie-hns");
    let killed = processes(&lab, "tortie agent");
    assert_eq!(killed.len(), 2);
    killed.iter().for_each(|agent| signal(agent, Signal::KILL));
    running.wait_for_line("a node's process has ended; the lab restarts it");
    lab.wait_until("both agents run again", || {
        let agents = processes(&lab, "tortie agent");
        agents.len() == 2 && agents.iter().all(|agent| killed.iter().all(|old| old.pid != agent.pid))
    });
    assert_eq!(processes(&lab, "tortie-hns")[0].pid, hns[0].pid, "it is a service that outlives the agent");

    // New objects must come into force on both.
    let more = [
        support::pod("late-linux", "primary", "linux-client"),
        support::pod("late-windows", "minion", "other"),
    ];
    let network_set = "apiVersion: projectcalico.org/v3\nkind: GlobalNetworkSet\nmetadata: {name: later}\nspec: {nets: [203.0.113.0/24]}\n";
    let applied = lab.ok(&["apply", "--wait", "-f", &lab.file("set.yml", network_set)]);
    assert!(applied.contains("in force on 2 nodes"), "{applied}");
    assert_eq!(objects(&lab, &primary), objects_before, "the agents took over what they found");
    lab.ok(&["apply", "-f", &lab.file("more.yml", &more.join("---\n"))]);
    lab.wait_for_pods();
    lab.wait_until("the late pod's label counts on the other node", || {
        matrix(&lab)[&("calico-demo/late-linux".to_owned(), "calico-demo/windows-server".to_owned())]
            == "reached"
    });
    let after = matrix(&lab);
    let verdict =
        |from: &str, to: &str| after[&(format!("calico-demo/{from}"), format!("calico-demo/{to}"))].clone();
    assert_eq!(verdict("late-windows", "windows-server"), "cut");
    for (from, to) in [
        ("late-windows", "linux-server"),
        ("late-linux", "linux-server"),
        ("linux-client", "late-linux"),
        ("windows-client", "late-windows"),
        ("linux-client", "late-windows"),
    ] {
        let expected =
            if to.starts_with("late") || to.ends_with("-server") { ["reached", "refused"] } else { ["", ""] };
        assert!(expected.contains(&verdict(from, to).as_str()), "{from} -> {to}: {}", verdict(from, to));
    }
    assert!(before.iter().all(|(pair, verdict)| after[pair] == *verdict), "{before:?}\n{after:?}");
    traffic.into_iter().for_each(Traffic::check);
    established.into_iter().for_each(Request::check);
    running.signal(Signal::TERM);
    running.wait();
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}

/// An incomplete sandbox is removed, and the pod runs as soon as possible. Other pods do not wait.
#[test]
fn a_hanging_hns_blocks_only_its_own_pods() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[]);
    lab.ok(&["apply", "-f", &lab.example("policy-demo-pods.yml")]);
    lab.wait_for_pods();
    let hns = processes(&lab, "tortie-hns").remove(0);
    signal(&hns, Signal::STOP);
    // More than the machine has threads for tasks.
    let stuck: Vec<String> = (0..12).map(|n| format!("stuck-{n}")).collect();
    let pods: Vec<String> = stuck.iter().map(|name| support::pod(name, "minion", "other")).collect();
    lab.ok(&["apply", "-f", &lab.file("stuck.yml", &pods.join("---\n"))]);
    let status =
        |pod: &str| lab.json(&["get", "pods", "-n", "calico-demo", pod, "-o", "json"])["status"].clone();
    let is_reported = |pod: &String| {
        let message = status(pod)["message"].as_str().unwrap_or_default().to_owned();
        message.contains("the emulated HNS of node minion")
    };
    lab.ok(&["apply", "-f", &lab.file("free.yml", &support::pod("free", "primary", "other"))]);
    lab.wait_until("a Linux pod runs", || status("free")["phase"] == "Running");
    assert!(!stuck.iter().any(is_reported), "the Linux pod runs before any call of HNS has ended");
    // The switch hangs, too: that is not policy, and the matrix does not call it policy.
    let output = lab.tortie(&["lab", "matrix", "-o", "json", "--port", "80"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let step: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(step["left_out"]["calico-demo/stuck-0"].is_string(), "{step}");
    for each in step["connections"].as_array().unwrap() {
        let end = |name: &str| each[name].as_str().unwrap().to_owned();
        let hangs =
            [end("from"), end("to")].iter().any(|end| end.contains("windows-") || end == "node/minion");
        let failed =
            each["verdict"] == "failed" && each["note"].as_str().unwrap().contains("the lab does not carry");
        assert_eq!(failed, hangs, "{each}");
    }

    lab.wait_until("it is told why", || is_reported(&stuck[0]));
    signal(&hns, Signal::CONT);
    lab.wait_for_pods();
    running.signal(Signal::TERM);
    running.wait();
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}

/// Puts lines of a shell script before each call of the plugin.
fn wrap_plugin(lab: &Lab, lines: &str) {
    use std::os::unix::fs::symlink;
    let (bin, real) = (lab.dir().join("bin/tortie-cni"), lab.dir().join("real"));
    std::fs::create_dir(&real).unwrap();
    symlink(std::fs::read_link(&bin).unwrap(), real.join("tortie-cni")).unwrap();
    std::fs::remove_file(&bin).unwrap();
    let script = format!("#!/bin/sh\n{lines}\nexec {}\n", real.join("tortie-cni").display());
    testkit::executables::write_script(&bin, &script);
}

/// A runtime repeats DEL until it succeeds. Otherwise the endpoint and the address of the pod would stay.
#[test]
fn a_deletion_that_fails_is_repeated() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[]);
    let tried = lab.dir().join("tried");
    let fail = format!("[ $CNI_COMMAND = DEL ] && mkdir {} 2>/dev/null && exit 1", tried.display());
    wrap_plugin(&lab, &fail);
    lab.ok(&["apply", "-f", &lab.example("policy-demo-pods.yml")]);
    lab.wait_for_pods();
    let endpoints = || {
        let endpoints = lab.json(&["get", "workloadendpoints", "-A", "-o", "json"]);
        endpoints["items"].as_array().unwrap().len()
    };
    assert_eq!(endpoints(), crate::PODS.len());
    lab.ok(&["delete", "pod", "-n", "calico-demo", "linux-client"]);
    lab.wait_until("the endpoint is gone", || endpoints() == crate::PODS.len() - 1);
    assert!(tried.exists(), "DEL has not failed");
    running.signal(Signal::TERM);
    running.wait();
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}

/// What a kubelet passes to the plugin of a pod, including its uid.
#[test]
fn the_plugin_receives_the_pods_uid() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[]);
    let log = lab.dir().join("told");
    wrap_plugin(&lab, &format!("echo \"$CNI_COMMAND $CNI_ARGS\" >> {}", log.display()));
    lab.ok(&["apply", "-f", &lab.example("policy-demo-pods.yml")]);
    lab.wait_for_pods();
    let log = std::fs::read_to_string(log).unwrap();
    for pod in crate::PODS {
        let pod = pod.rsplit('/').next().unwrap();
        let stored = lab.json(&["get", "pods", "-n", "calico-demo", pod, "-o", "json"]);
        let uid = stored["metadata"]["uid"].as_str().unwrap();
        let line = log.lines().find(|line| line.contains(&format!("K8S_POD_NAME={pod};"))).unwrap();
        assert!(line.starts_with("ADD ") && line.contains(&format!("K8S_POD_UID={uid}")), "{line}");
    }
    running.signal(Signal::TERM);
    running.wait();
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}
