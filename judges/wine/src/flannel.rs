//! flanneld for Windows against the emulated HNS, beside a Linux node with flanneld or Tortie: each of the backends `host-gw` and `vxlan` makes a
//! network, win-bridge and win-overlay connect pods to it, and packets pass between the nodes.
//!
//! flannel's own CNI plugin is not among the programs: it is not served as a Go module. The configurations of the plugins are those that
//! it makes of `subnet.env` (flannel-io/cni-plugin, `flannel_windows.go`).

mod linux;

use std::cell::RefCell;
use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ipnet::{IpNet, Ipv4Net};
use serde_json::{Value, json};
use tortie_hcn::schema::{Namespace, NetworkMode, RemoteSubnetRoute};
use tortie_hcn::{Guid, HcnExt as _};
use tortie_hns_emulator::{Config, Emulator, bind_compartment};
use tortie_kernel::namespace::NetNs;
use tortie_kernel::route::RouteSocket;
use tortie_servers::programs::FLANNEL;
use tortie_servers::wine::{HNS_ADDRESS, windows_path};
use tortie_servers::{KubeApi, KubeOptions};

use self::linux::{LinuxNode, Member};
use super::clients::VERSIONS;
use super::cluster::{Hns, NODE, windows_kubeconfig};
use super::frames::{path_of, send};
use super::linux_node::{self, LINUX_NODE, address, build_tortie};
use super::plugins;
use super::powershell::{self, PowerShell};
use super::prefix::{Killed, Prefix, plugin_output};
use super::underlay::Underlay;
use super::wait;
use setup::windows::{Libraries, POWERSHELL};
use setup::{go, step, workspace};

const PACKAGE: &str = "github.com/flannel-io/flannel";
/// The addresses of the Windows node, of the Linux node, and of a machine outside.
const WINDOWS: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 3);
const LINUX: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 1);
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 9);
/// The addresses of all pods, and of those of each node.
const PODS: &str = "10.244.0.0/16";
const WINDOWS_SUBNET: &str = "10.244.3.0/24";
const LINUX_SUBNET: &str = "10.244.1.0/24";
const SERVICES: &str = "10.96.0.0/12";
const PATIENCE: Duration = Duration::from_secs(60);
const LOG: &str = "flanneld.log";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Backend {
    HostGw,
    Vxlan,
}

/// The programs for Windows, and `tortie` for the Linux node.
struct Programs {
    flanneld: PathBuf,
    plugins: PathBuf,
    tortie: PathBuf,
}

pub(super) fn run(libraries: &Libraries) -> Result<()> {
    let programs = build()?;
    for version in VERSIONS {
        for backend in [Backend::HostGw, Backend::Vxlan] {
            for member in [Member::Flanneld, Member::Tortie] {
                let name = format!("flanneld with {} beside {member} on HNS {version}", backend.name());
                step(&name, || {
                    let config = Config::as_hns(version, WINDOWS);
                    let cluster = Cluster::new(libraries, &programs, backend, config)?;
                    cluster.run(member).with_context(|| cluster.log())
                })?;
            }
        }
    }
    Ok(())
}

/// Builds flanneld for both systems, the plugins, and `tortie`.
fn build() -> Result<Programs> {
    go::build_kube()?;
    go::build(&FLANNEL)?;
    let flanneld = workspace()?.join("target/flannel-windows/flanneld.exe");
    let mut command = go::for_windows(&FLANNEL.folder())?;
    command.args(["build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o"]);
    setup::run(command.arg(&flanneld).arg(PACKAGE))?;
    Ok(Programs { flanneld, plugins: plugins::build()?, tortie: build_tortie()? })
}

impl Backend {
    fn name(self) -> &'static str {
        match self {
            Self::HostGw => "host-gw",
            Self::Vxlan => "vxlan",
        }
    }

    /// The backend in flannel's configuration. Windows needs this identifier and this port.
    fn settings(self) -> Value {
        match self {
            Self::HostGw => json!({"Type": "host-gw", "Name": self.network()}),
            Self::Vxlan => json!({"Type": "vxlan", "VNI": 4096, "Port": 4789}),
        }
    }

    /// The name of the HNS network.
    fn network(self) -> &'static str {
        match self {
            Self::HostGw => "cbr0",
            Self::Vxlan => "flannel.4096",
        }
    }

    fn plugin(self) -> &'static str {
        match self {
            Self::HostGw => "win-bridge",
            Self::Vxlan => "win-overlay",
        }
    }
}

/// A Windows node with flanneld, a Linux node, and an API server on the loopback of the Windows node.
struct Cluster<'a> {
    // Fields are dropped in this order.
    windows: RefCell<Option<Killed>>,
    linux: RefCell<Option<LinuxNode>>,
    machine: Prefix,
    kube: KubeApi,
    hns: Hns,
    power_shell: PowerShell,
    underlay: Underlay,
    backend: Backend,
    programs: &'a Programs,
}

struct Pod {
    name: &'static str,
    namespace: Guid,
    address: Ipv4Addr,
    container: NetNs,
}

impl<'a> Cluster<'a> {
    fn new(libraries: &Libraries, programs: &'a Programs, backend: Backend, config: Config) -> Result<Self> {
        let underlay = Underlay::new([WINDOWS, LINUX, OUTSIDE])?;
        let emulator = Emulator::with_switch(config, NetNs::open(&path_of(&underlay.windows))?)?;
        // Programs under Wine have the loopback of the node.
        let hns = underlay.windows.run(|| Hns::serve(emulator))??;
        let kube = underlay.windows.run(|| KubeApi::start(&KubeOptions::default()))??;
        linux_node::relay(&underlay, kube.port())?;
        let machine = Prefix::new(libraries, (HNS_ADDRESS, &hns.address.to_string()))?;
        let program = machine.drive().join("windows/system32/WindowsPowerShell/v1.0").join(POWERSHELL);
        // The file is that of the template.
        fs::remove_file(&program)?;
        fs::copy(libraries.folder.join(POWERSHELL), program)?;
        let power_shell = PowerShell::start(&underlay.windows)?;
        let network = json!({"Network": PODS, "Backend": backend.settings()});
        fs::write(machine.outside().join("net-conf.json"), network.to_string())?;
        let (windows, linux) = (RefCell::default(), RefCell::default());
        Ok(Self { windows, linux, machine, kube, hns, power_shell, underlay, backend, programs })
    }

    fn run(&self, member: Member) -> Result<()> {
        for (name, subnet) in [(NODE, WINDOWS_SUBNET), (LINUX_NODE, LINUX_SUBNET)] {
            let spec = json!({"podCIDR": subnet, "podCIDRs": [subnet]});
            let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": spec});
            let kube = &self.kube;
            self.underlay.windows.run(|| kube.apply(&node.to_string()))??;
        }
        let Self { backend, programs, underlay, .. } = self;
        let linux =
            LinuxNode::start(member, *backend, programs, underlay, &self.kube, self.machine.outside())?;
        let far = (NetNs::open(&path_of(&linux.pod))?, linux.address);
        *self.linux.borrow_mut() = Some(linux);
        self.start()?;
        self.until("the nodes know each other", || Ok(self.knows_linux()? && self.linux_knows()?))?;
        self.network_is_right()?;
        let pods = [self.add("first")?, self.add("second")?];
        self.exchange(&pods, &far).context("packets")?;
        let before = self.objects()?;
        self.start().context("another start of flanneld")?;
        // flanneld makes the routes that are there once more, so HNS has none for a moment.
        let end = Instant::now() + PATIENCE;
        while let Err(error) = self.exchange(&pods, &far) {
            ensure!(Instant::now() < end, "packets after another start: {error:#}");
        }
        let after = self.objects()?;
        ensure!(before == after, "another start has changed {before} to {after}");
        let kube = &self.kube;
        self.underlay.windows.run(|| kube.kubectl(&["delete", "node", LINUX_NODE]))??;
        self.until("the Linux node is forgotten", || Ok(!self.knows_linux()?))?;
        // Nobody listens there, so the Linux node's pod would refuse it.
        let closed = (far.1, 81).into();
        let reached =
            pods[0].container.run(|| TcpStream::connect_timeout(&closed, Duration::from_millis(700)))?;
        let is_lost = |error: io::Error| error.kind() != io::ErrorKind::ConnectionRefused;
        ensure!(reached.err().is_some_and(is_lost), "{closed} is still reached");
        for pod in &pods {
            plugin_output(&mut self.plugin("DEL", pod.name, pod.namespace)?)?;
        }
        let network = self.network()?;
        let left = self.hns.emulator.endpoints_of_network(network)?;
        let left: Vec<_> = left.iter().map(|endpoint| endpoint.name.as_str()).collect();
        let expected: &[&str] = if self.backend == Backend::HostGw { &["cbr0_ep"] } else { &[] };
        ensure!(left == expected, "endpoints are left: {left:?}");
        self.commands_are_right()
    }

    /// Starts flanneld of the Windows node, also instead of one that runs, and waits until it is ready.
    fn start(&self) -> Result<()> {
        self.windows.borrow_mut().take();
        let subnet = self.subnet_file();
        if subnet.exists() {
            fs::remove_file(&subnet)?;
        }
        let mut command = self.machine.command(&self.programs.flanneld);
        let kubeconfig = windows_kubeconfig(&self.kube, self.machine.outside())?;
        let folder = self.machine.outside();
        command.args(["--kube-subnet-mgr", "--ip-masq"]).env("NODE_NAME", NODE);
        command.arg(format!("--iface={WINDOWS}"));
        command.arg(format!("--kubeconfig-file={}", windows_path(&kubeconfig)));
        command.arg(format!("--net-config-path={}", windows_path(&folder.join("net-conf.json"))));
        command.arg(format!("--subnet-file={}", windows_path(&subnet)));
        command.env(powershell::ADDRESS, self.power_shell.address.to_string());
        self.underlay.windows.enter_on_spawn(&mut command)?;
        let log = File::options().create(true).append(true).open(self.machine.outside().join(LOG))?;
        let started = Killed(command.stdout(log.try_clone()?).stderr(log).spawn()?);
        *self.windows.borrow_mut() = Some(started);
        self.until("flanneld writes its subnet", || Ok(subnet.exists()))
    }

    fn subnet_file(&self) -> PathBuf {
        self.machine.outside().join("subnet.env")
    }

    /// Whether the Windows node has a route to the Linux node's pods.
    fn knows_linux(&self) -> Result<bool> {
        let subnet: Ipv4Net = LINUX_SUBNET.parse()?;
        match self.backend {
            Backend::HostGw => has_route(&self.underlay.windows, subnet, LINUX),
            Backend::Vxlan => {
                let network = self.hns.emulator.network(self.network()?)?;
                let mut routes = network
                    .policies
                    .iter()
                    .filter_map(|it| it.settings::<RemoteSubnetRoute>().ok().flatten());
                Ok(routes.any(|it| {
                    it.destination_prefix == LINUX_SUBNET && it.provider_address == LINUX.to_string()
                }))
            }
        }
    }

    /// Whether the Linux node has a route to the Windows node's pods.
    fn linux_knows(&self) -> Result<bool> {
        let subnet: Ipv4Net = WINDOWS_SUBNET.parse()?;
        let hop = if self.backend == Backend::HostGw { WINDOWS } else { subnet.network() };
        has_route(&self.underlay.linux, subnet, hop)
    }

    fn network(&self) -> Result<Guid> {
        let network = self.hns.emulator.network_by_name(self.backend.network())?;
        Ok(network.with_context(|| format!("there is no network {}", self.backend.network()))?.id)
    }

    /// The network, the node's endpoint and the file for plugins are as flannel says.
    fn network_is_right(&self) -> Result<()> {
        let network = self.hns.emulator.network(self.network()?)?;
        let mode = if self.backend == Backend::HostGw { NetworkMode::L2Bridge } else { NetworkMode::Overlay };
        let subnets: Vec<_> = network.subnets().map(|it| it.ip_address_prefix.as_str()).collect();
        ensure!(network.r#type == mode && subnets == [WINDOWS_SUBNET], "{network:?}");
        let endpoints = self.hns.emulator.endpoints_of_network(network.id)?;
        let addresses: Vec<_> =
            endpoints.iter().flat_map(|it| &it.ip_configurations).map(|it| it.ip_address.as_str()).collect();
        let expected: &[&str] = if self.backend == Backend::HostGw { &["10.244.3.2"] } else { &[] };
        ensure!(addresses == expected, "{endpoints:?}");
        let mtu = if self.backend == Backend::HostGw { 1500 } else { 1450 };
        let file = fs::read_to_string(self.subnet_file())?;
        let expected = format!(
            "FLANNEL_NETWORK={PODS}\nFLANNEL_SUBNET=10.244.3.1/24\nFLANNEL_MTU={mtu}\nFLANNEL_IPMASQ=true\n"
        );
        ensure!(file == expected, "{file}");
        Ok(())
    }

    /// What PowerShell was asked for, in the two starts of flanneld.
    fn commands_are_right(&self) -> Result<()> {
        let commands = self.power_shell.commands();
        if self.backend == Backend::Vxlan {
            ensure!(commands.is_empty(), "{commands:?}");
            return Ok(());
        }
        let count = |what: &str| commands.iter().filter(|command| command.starts_with(what)).count();
        let counts = ["Set-NetIPInterface", "New-NetRoute", "Remove-NetRoute"].map(count);
        ensure!(counts == [4, 1, 1], "{commands:#?}");
        Ok(())
    }

    fn add(&self, name: &'static str) -> Result<Pod> {
        let namespace = self.hns.service.create_namespace(&Namespace::default())?;
        // host-local gives the first pod the address of the node's endpoint, which HNS refuses. Runtimes try again.
        let refused = if self.backend == Backend::HostGw && name == "first" { 1 } else { 0 };
        for _ in 0..refused {
            let tried = self.plugin("ADD", name, namespace)?.output()?;
            let text = String::from_utf8_lossy(&tried.stdout);
            ensure!(!tried.status.success() && text.contains("10.244.3.2"), "{tried:?}");
        }
        let added = plugin_output(&mut self.plugin("ADD", name, namespace)?)?;
        let result: Value = serde_json::from_slice(&added.stdout)?;
        let (address, container) = (address(&result)?, NetNs::create()?);
        bind_compartment(&*self.hns.service, namespace, Some(&path_of(&container)))?;
        Ok(Pod { name, namespace, address, container })
    }

    /// A plugin, as flannel's plugin calls it.
    fn plugin(&self, command: &str, pod: &str, namespace: Guid) -> Result<Command> {
        let input = self.machine.outside().join("input");
        fs::write(&input, self.delegate()?.to_string())?;
        let program = self.programs.plugins.join(self.backend.plugin()).with_extension("exe");
        let mut plugin = self.machine.command(&program);
        plugin.stdin(File::open(&input)?).env("CNI_COMMAND", command).env("CNI_IFNAME", "eth0");
        plugin.env("CNI_CONTAINERID", pod).env("CNI_NETNS", namespace.to_string()).env("CNI_ARGS", "");
        plugin.env("CNI_PATH", windows_path(&self.programs.plugins));
        self.underlay.windows.enter_on_spawn(&mut plugin)?;
        Ok(plugin)
    }

    /// The configuration that flannel's plugin makes of `subnet.env` and of a `delegate`, which is that of the SDN scripts.
    fn delegate(&self) -> Result<Value> {
        let file = fs::read_to_string(self.subnet_file())?;
        let value = |key: &str| {
            let found = file.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
            found.with_context(|| format!("{key} is not in {file}"))
        };
        let route =
            |to: &str| json!({"Type": "SDNRoute", "Settings": {"DestinationPrefix": to, "NeedEncap": true}});
        let nat = json!({"Type": "OutBoundNAT", "Settings": {"Exceptions": [PODS, SERVICES]}});
        let mut policies = vec![nat, route(SERVICES)];
        if self.backend == Backend::HostGw {
            policies.push(route(&format!("{WINDOWS}/32")));
        }
        let policies: Vec<Value> =
            policies.into_iter().map(|value| json!({"name": "EndpointPolicy", "value": value})).collect();
        let addresses = windows_path(&self.machine.outside().join("addresses"));
        let subnet: Ipv4Net = value("FLANNEL_SUBNET")?.parse()?;
        Ok(json!({"cniVersion": "1.0.0", "name": self.backend.network(), "type": self.backend.plugin(),
            "apiVersion": 2, "policies": policies, "dns": {"nameservers": ["10.96.0.10"]},
            "ipMasq": value("FLANNEL_IPMASQ")? == "true", "ipMasqNetwork": value("FLANNEL_NETWORK")?,
            "ipam": {"type": "host-local", "subnet": subnet.trunc(), "dataDir": addresses}}))
    }

    /// Pods reach each other, and both nodes, with their own addresses. Beyond, they have that of their node.
    fn exchange(&self, [one, other]: &[Pod; 2], far: &(NetNs, Ipv4Addr)) -> Result<()> {
        let Underlay { windows, linux, outside, .. } = &self.underlay;
        let [first, second] = [one, other].map(|pod| (&pod.container, pod.address));
        let far = (&far.0, far.1);
        for (from, to) in
            [(first, second), (second, first), (first, far), (far, first), (second, far), (far, second)]
        {
            send(from.0, to, Some(from.1)).with_context(|| format!("{} to {}", from.1, to.1))?;
        }
        for (what, from, to, source) in [
            ("the Windows node to its pod", windows, first, None),
            ("the Windows node to the Linux node's pod", windows, far, None),
            ("the Linux node to the Windows node's pod", linux, first, None),
            ("a pod to its node", first.0, (windows, WINDOWS), Some(first.1)),
            ("a pod to the other node", first.0, (linux, LINUX), Some(WINDOWS)),
            ("a pod to the outside", first.0, (outside, OUTSIDE), Some(WINDOWS)),
        ] {
            send(from, to, source).context(what)?;
        }
        Ok(())
    }

    /// The network and its endpoints, as HNS shows them.
    fn objects(&self) -> Result<Value> {
        let network = self.network()?;
        let shown = |kind, id| -> Result<Value> {
            let query = tortie_hcn::Call::Query { kind, id, query: String::new() };
            Ok(serde_json::from_str(&tortie_hcn::Hcn::call(&*self.hns.emulator, &query)?)?)
        };
        let endpoints = self.hns.emulator.endpoints_of_network(network)?;
        let endpoints = endpoints.iter().map(|it| shown(tortie_hcn::Kind::Endpoint, it.id));
        let endpoints: Vec<Value> = endpoints.collect::<Result<_>>()?;
        Ok(json!([shown(tortie_hcn::Kind::Network, network)?, endpoints]))
    }

    fn log(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.machine.outside().join(name)).unwrap_or_default();
        let commands = self.power_shell.commands().join("\n");
        format!("Windows:\n{}\nLinux:\n{}\nPowerShell:\n{commands}", read(LOG), read(linux_node::LOG))
    }

    fn until(&self, what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
        wait::until(what, PATIENCE, || {
            if let Some(linux) = &mut *self.linux.borrow_mut() {
                linux.daemon.runs()?;
            }
            if let Some(Killed(daemon)) = &mut *self.windows.borrow_mut()
                && let Some(status) = daemon.try_wait()?
            {
                bail!("flanneld for Windows has ended: {status}");
            }
            is_so()
        })
    }
}

fn has_route(node: &NetNs, subnet: Ipv4Net, hop: Ipv4Addr) -> Result<bool> {
    let routes = node.run(|| RouteSocket::open()?.routes())??;
    Ok(routes.iter().any(|it| it.destination == IpNet::V4(subnet) && it.gateway == Some(hop.into())))
}
