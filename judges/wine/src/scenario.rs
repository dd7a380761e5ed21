//! The life of a node: pods come, policy changes, HNS restarts, the agent is away while a pod goes.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tortie_hcn::schema::{Endpoint, Namespace, NetAdapterName, Policy, SdnRoute};
use tortie_hcn::selftest::{CANARY, HnsReport};
use tortie_hcn::{Guid, HcnExt};
use tortie_hns_emulator::{Config, Packet, PacketDirection, Survives, Verdict};
use tortie_servers::wine::{HNS_ADDRESS, windows_path};

use super::cluster::{ADDRESS, Cluster, Hns, NODE, hns};
use super::prefix::{Killed, Prefix, output, plugin_output};
use super::wait;
use setup::step;
use setup::windows::Built;

/// How long to wait for what must happen.
const PATIENCE: Duration = Duration::from_secs(60);

/// The agent's log on the node.
const LOG: &str = "agent.log";

/// A client that policy allows, at first, and another one.
const FIRST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 5);
const SECOND: Ipv4Addr = Ipv4Addr::new(10, 8, 0, 5);

/// What the runtime passes for pods.
const DNS_SERVER: &str = "10.96.0.10";

/// A Windows node.
struct WindowsNode<'a> {
    runtime: tokio::runtime::Runtime,
    built: &'a Built,
    machine: Prefix,
    cluster: Cluster,
    hns: Hns,
    /// The machine's adapter that the operator chooses, by name.
    adapter: String,
    /// An address of it.
    address: Ipv4Addr,
}

/// A pod with its namespace in HNS and the result of ADD.
struct Pod {
    name: &'static str,
    namespace: Guid,
    result: Value,
}

/// Runs the scenario.
pub(crate) fn run(built: &Built) -> Result<()> {
    let hns = Hns::start(hns(Config::SERVER_2022))?;
    let machine = Prefix::new(&built.libraries, (HNS_ADDRESS, &hns.address.to_string()))?;
    let runtime = tokio::runtime::Runtime::new()?;
    let cluster = runtime.block_on(Cluster::new(machine.outside()))?;
    runtime.block_on(cluster.allow("10.9.0.0/24"))?;
    let (adapter, address) = adapter(built, &machine)?;
    let node = WindowsNode { runtime, built, machine, cluster, hns, adapter, address };
    node.whole_life().with_context(|| node.log())
}

/// An adapter of the machine, as the program shows it. Its route is shown, too.
fn adapter(built: &Built, machine: &Prefix) -> Result<(String, Ipv4Addr)> {
    let shown = output(machine.command(&built.tortie()).args(["windows", "adapters"]))?.stdout;
    let shown: Value = serde_json::from_slice(&shown)?;
    let adapters = shown["adapters"].as_array().context("no adapters")?;
    let usable = adapters.iter().find_map(|adapter| {
        let addresses = adapter["addresses"].as_array()?.iter().filter_map(Value::as_str);
        let mut addresses = addresses.filter_map(|net| net.split('/').next()?.parse::<Ipv4Addr>().ok());
        let address = addresses.find(|address| !address.is_loopback() && !address.is_link_local())?;
        Some((adapter, address)).filter(|_| adapter["isUp"] == true)
    });
    let (adapter, address) = usable.context("this machine has no adapter with an IPv4 address")?;
    let index = &adapter["index"];
    let routes = shown["routes"].as_array().context("no routes")?;
    ensure!(routes.iter().any(|route| route["interface"] == *index), "{shown:#}");
    ensure!(adapter["mtu"].as_u64().is_some_and(|mtu| mtu >= 576), "{adapter}");
    Ok((adapter["name"].as_str().context("no name")?.to_owned(), address))
}

impl WindowsNode<'_> {
    fn whole_life(&self) -> Result<()> {
        let agent = self.start_agent()?;
        step("the overlay network exists", || {
            let network = self.hns.emulator.network_by_name("Calico")?.context("there is none")?;
            let adapter =
                network.policies.iter().find_map(|policy| policy.settings::<NetAdapterName>().ok().flatten());
            ensure!(
                adapter.is_some_and(|adapter| adapter.network_adapter_name == self.adapter),
                "{network:?}"
            );
            let kept = self.machine.drive().join("ProgramData/tortie/adapter-routes.json");
            let kept: Value = serde_json::from_slice(&fs::read(kept).context("the adapter's routes")?)?;
            ensure!(kept["adapter"] == self.adapter.as_str(), "{kept}");
            Ok(())
        })?;
        step("a command reaches the agent by its pipe", || self.log_level())?;
        step("kube-proxy gets its flags", || {
            let printed = output(self.machine.command(&self.built.tortie()).args(["windows", "kube-proxy"]))?;
            let printed = String::from_utf8(printed.stdout)?;
            let flags: Vec<&str> = printed.lines().collect();
            let network = self.hns.emulator.network_by_name("Calico")?.context("there is no network")?;
            let vip = format!("--source-vip={}", tortie_windows::source_vip(&network)?);
            let expected = ["--proxy-mode=kernelspace", "--network-name=Calico", &vip, "--enable-dsr=true"];
            ensure!(flags == expected, "{flags:?}");
            Ok(())
        })?;
        step("the selftest finds what HNS does, and removes its network", || self.selftest())?;
        let (web, other) = (self.add("web")?, self.add("other")?);
        step("ADD connects pods, and policy is in force", || {
            ensure!(self.endpoints()?.len() == 2, "{:?}", self.endpoints()?);
            [&web, &other].into_iter().try_for_each(|pod| self.is_reached(pod, FIRST, SECOND))?;
            // Every address of the machine, which the node's object does not name.
            let from_machine = self.verdict(&web, self.address, 81)?;
            ensure!(from_machine == Verdict::Allow, "from {}: {from_machine:?}", self.address);
            Ok(())
        })?;
        step("an endpoint has the runtime's settings of DNS", || {
            ensure!(web.result["dns"]["nameservers"][0] == DNS_SERVER, "{}", web.result);
            let configured = |endpoint: &Endpoint| {
                endpoint.dns.as_ref().is_some_and(|dns| dns.server_list == [DNS_SERVER])
            };
            ensure!(self.endpoints()?.iter().all(configured), "{:?}", self.endpoints()?);
            let routed = |endpoint: &Endpoint| endpoint.policies.iter().any(Policy::is::<SdnRoute>);
            ensure!(self.endpoints()?.iter().all(routed), "{:?}", self.endpoints()?);
            Ok(())
        })?;
        step("CHECK finds what ADD made", || {
            let checked = self.plugin("CHECK", &web, &web.result)?;
            ensure!(checked.is_null(), "{checked}");
            let elsewhere = Pod { namespace: Guid::random(), result: Value::Null, ..web };
            let differs = self.plugin("CHECK", &elsewhere, &web.result);
            ensure!(differs.is_err(), "CHECK accepts another namespace");
            Ok(())
        })?;
        step("a changed policy is in force", || {
            self.runtime.block_on(self.cluster.allow("10.8.0.0/24"))?;
            until("the verdicts", || Ok(self.is_reached(&web, SECOND, FIRST).is_ok()))
        })?;
        step("after a restart of HNS, endpoints are closed again", || self.restart_hns(&web))?;
        step("no handle stays open", || {
            ensure!(self.hns.service.opened() > 20, "{} handles", self.hns.service.opened());
            until("all handles are closed", || Ok(self.hns.service.open_handles().is_empty()))
        })?;
        drop(agent);
        // Windows closes the handles of a process that is killed within a call; the emulated HNS does not.
        let left = self.hns.service.open_handles().len();
        step("without the agent, ADD fails and DEL succeeds", || {
            let refused = self.add("late").err().context("ADD succeeds")?;
            ensure!(format!("{refused:#}").contains("\"code\":11"), "{refused:#}");
            self.del(&other)?;
            ensure!(self.endpoints()?.len() == 2, "nobody could remove the endpoint");
            ensure!(fs::read_dir(self.queue())?.count() == 1, "one deletion is kept");
            Ok(())
        })?;
        let agent = self.start_agent()?;
        step("the deletion is carried out when the agent is back", || {
            until("one endpoint is left", || Ok(self.endpoints()?.len() == 1))?;
            until("the queue is empty", || Ok(fs::read_dir(self.queue())?.count() == 0))
        })?;
        step("DEL removes the endpoint and the address", || {
            self.is_reached(&web, SECOND, FIRST)?;
            self.del(&web)?;
            ensure!(self.endpoints()?.is_empty(), "{:?}", self.endpoints()?);
            let allocated = self.runtime.block_on(self.cluster.allocated())?;
            ensure!(allocated == 0, "{allocated} addresses are left");
            self.del(&web).context("DEL again")
        })?;
        until("all handles are closed", || Ok(self.hns.service.open_handles().len() <= left))?;
        drop(agent);
        step("the agent runs as a service", || self.runs_as_a_service())
    }

    /// What only packets tell has no answer here.
    fn selftest(&self) -> Result<()> {
        let printed =
            output(self.machine.command(&self.built.tortie()).args(["windows", "selftest", "--save"]))?
                .stdout;
        let report: HnsReport = serde_json::from_slice(&printed)?;
        let saved = fs::read_to_string(self.machine.drive().join("ProgramData/tortie/selftest.json"))?;
        ensure!(HnsReport::parse(&saved)? == report, "{saved}");
        until("the agent has read it", || Ok(self.log().contains("the report of the selftest")))?;
        let (found, started) = (Config::of_report(&report, ADDRESS), hns(Config::SERVER_2022));
        ensure!(format!("{found:?}") == format!("{started:?}"), "{found:#?}\n{started:#?}");
        ensure!(report.switch_default.is_none(), "{report:?}");
        ensure!(self.hns.emulator.network_by_name(CANARY)?.is_none(), "the network is still there");
        Ok(())
    }

    fn start_agent(&self) -> Result<Killed> {
        let log = File::options().create(true).append(true).open(self.machine.outside().join(LOG))?;
        let mut command = self.machine.command(&self.built.tortie());
        command.args(self.arguments());
        command.stdout(Stdio::null()).stderr(log);
        let configuration = self.machine.drive().join("etc/cni/net.d").join(tortie_deploy::CNI_CONFIG_FILE);
        match fs::remove_file(&configuration) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        let mut agent = Killed(command.spawn()?);
        until("the agent serves", || {
            if let Some(status) = agent.0.try_wait()? {
                bail!("the agent has ended: {status}");
            }
            Ok(configuration.exists())
        })?;
        Ok(agent)
    }

    /// The arguments of the agent.
    fn arguments(&self) -> Vec<String> {
        let files = &self.cluster.files;
        let store = format!("tls:{}", self.cluster.address);
        let [authority, certificate, key] =
            [&files.authority, &files.certificate, &files.key].map(|file| windows_path(file));
        let arguments = [
            ("--node", NODE),
            ("--store", &store),
            ("--adapter", &self.adapter),
            ("--service-cidr", "10.96.0.0/12"),
            ("--tls-authority", &authority),
            ("--tls-certificate", &certificate),
            ("--tls-key", &key),
            ("--cni-conf-dir", r"C:\etc\cni\net.d"),
        ];
        let arguments = arguments.into_iter().flat_map(|(option, value)| [option, value]);
        std::iter::once("agent").chain(arguments).map(str::to_owned).collect()
    }

    /// The service manager starts the agent, which answers a command, and stops it.
    fn runs_as_a_service(&self) -> Result<()> {
        let run = |program: &str, arguments: &[&str]| -> Result<String> {
            let output = output(self.machine.command(Path::new(program)).args(arguments))?;
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let mut command = vec![windows_path(&self.built.tortie())];
        command.extend(self.arguments());
        command.push("--service".to_owned());
        let command: Vec<String> = command.iter().map(|part| format!("\"{part}\"")).collect();
        run("sc", &["create", "tortie", "binPath=", &command.join(" ")])?;
        // Without another process, Wine ends all services after three seconds.
        let _logged_in = self.logged_in()?;
        let state = || run("sc", &["query", "tortie"]);
        let log = self.machine.drive().join("ProgramData/tortie/agent.log");
        let started = run("sc", &["start", "tortie"])?;
        let mut refused = None;
        let answered = until("the service answers", || {
            refused = self.log_level().err();
            Ok(refused.is_none())
        });
        answered.with_context(|| {
            let log = fs::read_to_string(&log);
            format!(
                "sc start: {started}\nsc query: {:?}\nlog-level: {refused:?}\nthe service's log: {log:?}",
                state()
            )
        })?;
        run("sc", &["stop", "tortie"])?;
        until("the service has stopped", || Ok(state()?.contains("STOPPED")))?;
        let log = fs::read_to_string(&log).context("the service's log")?;
        ensure!(log.contains("stopping; policy stays in force"), "{log}");
        let source = r"HKLM\SYSTEM\CurrentControlSet\Services\EventLog\Application\tortie";
        let source = run("reg", &["query", source])?;
        ensure!(source.contains("EventCreate.exe"), "the source of events: {source}");
        Ok(())
    }

    /// A process that waits for a key.
    fn logged_in(&self) -> Result<Killed> {
        let mut command = self.machine.command(Path::new("cmd"));
        command.args(["/c", "echo ready & pause"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Killed(command.spawn()?);
        let printed = process.0.stdout.as_mut().context("no output")?;
        printed.read_exact(&mut [0]).context("cmd")?;
        Ok(process)
    }

    fn add(&self, name: &'static str) -> Result<Pod> {
        self.runtime.block_on(self.cluster.pod(name))?;
        let namespace = self.hns.service.create_namespace(&Namespace::default())?;
        let pod = Pod { name, namespace, result: Value::Null };
        let result = self.plugin("ADD", &pod, &Value::Null)?;
        Ok(Pod { result, ..pod })
    }

    fn del(&self, pod: &Pod) -> Result<()> {
        let answer = self.plugin("DEL", pod, &pod.result)?;
        ensure!(answer.is_null(), "{answer}");
        Ok(())
    }

    /// Runs the plugin as a runtime does, and returns its document.
    fn plugin(&self, command: &str, pod: &Pod, before: &Value) -> Result<Value> {
        let mut config = json!({"cniVersion": "1.0.0", "name": "net", "type": "tortie-cni",
            "runtimeConfig": {"dns": {"servers": [DNS_SERVER]}}});
        if !before.is_null() {
            config["prevResult"] = before.clone();
        }
        let input = self.machine.outside().join("input");
        File::create(&input)?.write_all(config.to_string().as_bytes())?;
        let mut plugin = self.machine.command(&self.built.plugin());
        plugin.stdin(File::open(&input)?).env("CNI_COMMAND", command);
        plugin.env("CNI_CONTAINERID", pod.name).env("CNI_NETNS", pod.namespace.to_string());
        plugin.env("CNI_IFNAME", "eth0").env("CNI_PATH", r"C:\opt\cni\bin");
        plugin.env("CNI_ARGS", format!("K8S_POD_NAMESPACE=n;K8S_POD_NAME={}", pod.name));
        let output = plugin_output(&mut plugin)?.stdout;
        Ok(if output.is_empty() { Value::Null } else { serde_json::from_slice(&output)? })
    }

    /// The command that uses the pipe for operators.
    fn log_level(&self) -> Result<()> {
        let mut command = self.machine.command(&self.built.tortie());
        let answer = output(command.args(["agent", "log-level", "info,tortie_windows=debug"]))?.stdout;
        let answer = String::from_utf8_lossy(&answer);
        let is_answer =
            answer.starts_with(&format!("node {NODE}: ")) && answer.contains("tortie_windows=debug");
        ensure!(is_answer, "{answer}");
        Ok(())
    }

    fn endpoints(&self) -> Result<Vec<Endpoint>> {
        let network = self.hns.emulator.network_by_name("Calico")?.context("no network")?;
        Ok(self.hns.emulator.endpoints_of_network(network.id)?)
    }

    /// Checks a pod: its endpoint is in its namespace, and one client reaches port 80, and nothing else passes.
    fn is_reached(&self, pod: &Pod, allowed: Ipv4Addr, denied: Ipv4Addr) -> Result<()> {
        let (_, endpoint) = self.endpoint(pod)?;
        ensure!(endpoint.host_compute_namespace == pod.namespace, "{endpoint:?}");
        for (client, port, expected) in
            [(allowed, 80, Verdict::Allow), (allowed, 81, Verdict::Block), (denied, 80, Verdict::Block)]
        {
            let verdict = self.verdict(pod, client, port)?;
            ensure!(verdict == expected, "{}: {client} to port {port}: {verdict:?}", pod.name);
        }
        Ok(())
    }

    /// The verdict on a connection to a pod.
    fn verdict(&self, pod: &Pod, client: Ipv4Addr, port: u16) -> Result<Verdict> {
        let (address, endpoint) = self.endpoint(pod)?;
        let packet = Packet {
            direction: PacketDirection::In,
            protocol: 6,
            local: address.into(),
            remote: client.into(),
            local_port: port,
            remote_port: 40_000,
        };
        Ok(self.hns.emulator.judge(endpoint.id, &packet)?)
    }

    /// A pod's address and endpoint.
    fn endpoint(&self, pod: &Pod) -> Result<(Ipv4Addr, Endpoint)> {
        let address = pod.result["ips"][0]["address"].as_str().and_then(|text| text.split('/').next());
        let address: Ipv4Addr = address.context("ADD gave no address")?.parse()?;
        let text = address.to_string();
        let has = |endpoint: &Endpoint| endpoint.ip_configurations.iter().any(|own| own.ip_address == text);
        let endpoint = self.endpoints()?.into_iter().find(has).context("no endpoint has the address")?;
        Ok((address, endpoint))
    }

    /// HNS restarts without the ACLs. The agent hears of it by the callback, and registers again.
    fn restart_hns(&self, pod: &Pod) -> Result<()> {
        let registrations = || self.log().matches("HNS sends its notifications").count();
        let before = registrations();
        ensure!(before > 0, "the agent has registered no callback");
        self.hns.emulator.restart(Survives::AllButAcls)?;
        ensure!(self.is_reached(pod, SECOND, FIRST).is_err(), "the ACLs have survived");
        self.hns.service.disconnect();
        until("the verdicts", || Ok(self.is_reached(pod, SECOND, FIRST).is_ok()))?;
        until("another registration", || Ok(registrations() > before))
    }

    fn queue(&self) -> PathBuf {
        self.machine.drive().join("ProgramData/tortie/cni-deletions")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.machine.outside().join(LOG)).unwrap_or_default()
    }
}

/// Waits until it is so.
fn until(what: &str, is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    wait::until(what, PATIENCE, is_so)
}
