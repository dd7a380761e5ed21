//! kube-proxy for Windows against the emulated HNS: Services and EndpointSlices of a real API server become load balancers, and
//! packets pass through them.

mod tortie;
mod traffic;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ipnet::Ipv4Net;
use serde_json::{Value, json};
use tortie_hcn::schema::{DrMacAddress, LoadBalancer, Namespace, NetworkMode, lenient};
use tortie_hcn::{Call, Guid, HResult, HcnExt as _, Kind, Version};
use tortie_hns_emulator::{Config, Emulator, bind_compartment};
use tortie_kernel::namespace::NetNs;
use tortie_servers::programs::E2E;
use tortie_servers::wine::{HNS_ADDRESS, windows_path};
use tortie_servers::{KubeApi, KubeOptions};
use tortie_windows::kube_proxy_flags;

use self::tortie::Programs;
use super::clients::VERSIONS;
use super::cluster::{Hns, NODE, windows_kubeconfig};
use super::frames::path_of;
use super::linux_node::build_tortie;
use super::prefix::{Killed, Prefix};
use super::underlay::{LINUX_MAC, Underlay, VNI, WindowsTunnel};
use super::wait;
use setup::windows::Libraries;
use setup::{go, step, windows, workspace};

/// kube-proxy, at the version of Kubernetes of the other tests.
const PACKAGE: &str = "k8s.io/kubernetes/cmd/kube-proxy";
/// The addresses of the Windows node, of the Linux node, and of a machine outside.
const WINDOWS: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 3);
const LINUX: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 1);
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 9);
/// The pods of the Windows node: a client and a server. The source VIP is an address of their block that IPAM keeps free.
const BLOCK: &str = "10.244.3.0/26";
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 244, 3, 1);
const SOURCE_VIP: Ipv4Addr = Ipv4Addr::new(10, 244, 3, 2);
/// The node's own endpoint in an L2Bridge network.
const NODE_END: Ipv4Addr = Ipv4Addr::new(10, 244, 3, 2);
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 244, 3, 10);
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 244, 3, 11);
/// The pod of the Linux node, and its block.
const FAR: Ipv4Addr = Ipv4Addr::new(10, 244, 1, 5);
const LINUX_BLOCK: &str = "10.244.1.0/26";
/// The Service, which both servers serve, and the port of every node that leads to it.
const VIP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 100);
const PORT: u16 = 80;
const NODE_PORT: u16 = 30_080;
/// The port of a Service with `externalTrafficPolicy: Local`.
const LOCAL_NODE_PORT: u16 = 30_081;
const TARGET: u16 = 8080;

/// How long kube-proxy may need. It waits ten seconds when it starts on an overlay.
const PATIENCE: Duration = Duration::from_secs(60);
const LOG: &str = "kube-proxy.log";
/// Enough connections to meet two backends.
const MANY: usize = 24;

pub(super) fn run(libraries: &Libraries) -> Result<()> {
    let program = build()?;
    for version in VERSIONS {
        for direct in [true, false] {
            let name = format!("kube-proxy {} on HNS {version}", manner(direct));
            step(&name, || {
                let cluster = Cluster::new(libraries, version, NetworkMode::Overlay)?;
                cluster.run(&program, direct).with_context(|| cluster.log())
            })?;
        }
        for direct in [true, false] {
            let name = format!("kube-proxy on an L2Bridge network {} on HNS {version}", manner(direct));
            step(&name, || {
                let cluster = Cluster::new(libraries, version, NetworkMode::L2Bridge)?;
                cluster.run_on_bridge(&program, direct).with_context(|| cluster.log())
            })?;
        }
    }
    Ok(())
}

/// Runs kube-proxy beside Tortie's agent.
pub(super) fn run_beside_tortie(_: &Libraries) -> Result<()> {
    let built = &windows::build()?;
    let programs = Programs { built, kube_proxy: build()?, tortie: build_tortie()? };
    for version in VERSIONS {
        for direct in [true, false] {
            let name = format!("kube-proxy beside Tortie's agent {} on HNS {version}", manner(direct));
            step(&name, || tortie::run(&programs, version, direct))?;
        }
    }
    Ok(())
}

fn manner(direct: bool) -> &'static str {
    if direct { "with direct server return" } else { "without direct server return" }
}

/// Builds kube-proxy for Windows.
fn build() -> Result<PathBuf> {
    go::build_kube()?;
    let program = workspace()?.join("target/kube-proxy/kube-proxy.exe");
    let mut command = go::for_windows(&E2E.folder())?;
    command.args(["build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o"]);
    setup::run(command.arg(&program).arg(PACKAGE))?;
    Ok(program)
}

/// A Windows node without kube-proxy, the machines around it, and an API server on its loopback.
struct Cluster {
    // Fields are dropped in this order.
    machine: Prefix,
    kube: KubeApi,
    hns: Hns,
    mode: NetworkMode,
    network: Guid,
    /// Where the pods of the Windows node are.
    client: NetNs,
    server: NetNs,
    underlay: Underlay,
}

impl Cluster {
    fn new(libraries: &Libraries, version: Version, mode: NetworkMode) -> Result<Self> {
        let underlay = Underlay::new([WINDOWS, LINUX, OUTSIDE])?;
        let config = Config::as_hns(version, WINDOWS);
        let emulator = Emulator::with_switch(config, NetNs::open(&path_of(&underlay.windows))?)?;
        // Programs under Wine have the loopback of the node.
        let hns = underlay.windows.run(|| Hns::serve(emulator))??;
        let kube = underlay.windows.run(|| KubeApi::start(&KubeOptions::default()))??;
        let machine = Prefix::new(libraries, (HNS_ADDRESS, &hns.address.to_string()))?;
        let network = create(&hns, Kind::Network, Guid::ZERO, &network(&mode))?;
        let block = BLOCK.parse::<Ipv4Net>()?;
        let gateway = if mode == NetworkMode::L2Bridge {
            hns.connect_node(network, "pods_ep", &NODE_END.to_string())?;
            underlay.routes((block, WINDOWS), (LINUX_BLOCK.parse()?, LINUX), FAR)?;
            NODE_END
        } else {
            let found = hns.emulator.network(network)?;
            let mac = found.policies.iter().find_map(|it| it.settings::<DrMacAddress>().ok().flatten());
            let mac = mac.context("the network has no MAC address")?.address.parse();
            let mac = mac.map_err(anyhow::Error::msg)?;
            underlay.overlay(FAR, &WindowsTunnel { block, gateway: GATEWAY, mac, node: WINDOWS })?;
            GATEWAY
        };
        let (client, server) = (pod(&hns, network, gateway, CLIENT)?, pod(&hns, network, gateway, SERVER)?);
        Ok(Self { machine, kube, hns, mode, network, client, server, underlay })
    }

    fn run(&self, program: &Path, direct: bool) -> Result<()> {
        self.create_services()?;
        // As `tortie windows kube-proxy` prints them.
        let network = self.hns.emulator.network(self.network)?;
        let flags = kube_proxy_flags(&network, self.hns.emulator.version()?, Some(NODE))?;
        let _proxy = self.start(program, &flags, direct)?;
        self.until("four load balancers", || Ok(self.balancers()?.len() == 4))?;
        self.clients_reach_the_backends(direct).context("both backends")?;
        self.create("EndpointSlice", &slice("web", &[(SERVER, NODE)], ("TCP", TARGET)))?;
        self.until("the Linux pod is no backend any more", || {
            Ok(self.backends(VIP)?.len() == 1 && self.backends_of_port(NODE_PORT)?.len() == 1)
        })?;
        let (seen, _) = self.seen(&self.client, VIP, PORT)?;
        ensure!(seen == BTreeSet::from([SERVER]), "after the change, {seen:?} serve");
        self.delete_services()?;
        self.until("no load balancer is left, and of remote endpoints that of the API's Service", || {
            let endpoints = self.hns.emulator.endpoints_of_network(self.network)?;
            let remote = endpoints.iter().filter(|endpoint| endpoint.is_remote());
            let remote: Vec<_> =
                remote.flat_map(|it| &it.ip_configurations).map(|it| &it.ip_address).collect();
            Ok(self.balancers()?.is_empty() && remote == ["10.96.0.1"])
        })?;
        self.until("no handle is open", || Ok(self.hns.service.open_handles().is_empty()))
    }

    fn run_on_bridge(&self, program: &Path, direct: bool) -> Result<()> {
        self.create_services()?;
        let flags = ["--proxy-mode=kernelspace", "--network-name=pods", "--hostname-override=win-1"];
        let _proxy = self.start(program, &flags.map(str::to_owned), direct)?;
        self.until("four load balancers", || Ok(self.balancers()?.len() == 4))?;
        self.clients_reach_the_backends(direct).context("both backends")?;
        let endpoints = self.hns.emulator.endpoints_of_network(self.network)?;
        let remote: Vec<_> = endpoints.iter().filter(|endpoint| endpoint.is_remote()).collect();
        let [far] = remote[..] else { bail!("the remote endpoints: {remote:?}") };
        ensure!(far.mac_address == "02-11-0a-f4-01-05" && far.policies.is_empty(), "{far:?}");
        for (what, backends, count) in [
            ("the ClusterIP", self.backends(VIP)?, 2),
            ("the NodePort", self.backends_of_port(NODE_PORT)?, 2),
            ("the local NodePort", self.backends_of_port(LOCAL_NODE_PORT)?, 1),
        ] {
            ensure!(backends.len() == count, "{what} has {backends:?}");
        }
        let directs = self.balancers()?.iter().filter(|balancer| balancer.is_direct()).count();
        let expected = if direct { 3 } else { 1 };
        ensure!(directs == expected, "all but the NodePort of the whole cluster: {:?}", self.balancers()?);
        self.delete_services()?;
        self.until("nothing is left", || {
            let endpoints = self.hns.emulator.endpoints_of_network(self.network)?;
            Ok(self.balancers()?.is_empty() && !endpoints.iter().any(|endpoint| endpoint.is_remote()))
        })?;
        self.until("no handle is open", || Ok(self.hns.service.open_handles().is_empty()))
    }

    /// The node, and two Services with a server on each node.
    fn create_services(&self) -> Result<()> {
        self.create("Node", &node(NODE, "windows", WINDOWS))?;
        self.create("Service", &service("web", VIP, NODE_PORT, "Cluster"))?;
        self.create("Service", &service("local", Ipv4Addr::new(10, 96, 0, 101), LOCAL_NODE_PORT, "Local"))?;
        for name in ["web", "local"] {
            self.create("EndpointSlice", &slice(name, &[(SERVER, NODE), (FAR, "linux-1")], ("TCP", TARGET)))?;
        }
        Ok(())
    }

    fn delete_services(&self) -> Result<()> {
        ["web", "local"].into_iter().try_for_each(|name| self.kubectl(&["delete", "service", name]).map(drop))
    }

    /// Every client reaches the Services by each of their addresses, and servers see the address that they should.
    fn clients_reach_the_backends(&self, direct: bool) -> Result<()> {
        let Underlay { windows, outside, .. } = &self.underlay;
        let both = BTreeSet::from([SERVER, FAR]);
        // Without an overlay, load balancers have the node's address.
        let (hidden, node) = match self.mode {
            NetworkMode::L2Bridge => (WINDOWS, WINDOWS),
            _ => (SOURCE_VIP, GATEWAY),
        };
        let of_client = if direct { CLIENT } else { hidden };
        let of_node = if direct { node } else { hidden };
        for (what, from, (address, port), servers, source) in [
            ("a pod by the ClusterIP", &self.client, (VIP, PORT), &both, of_client),
            ("the node by the ClusterIP", windows, (VIP, PORT), &both, of_node),
            ("a pod by the NodePort", &self.client, (WINDOWS, NODE_PORT), &both, hidden),
            ("the node by the NodePort", windows, (WINDOWS, NODE_PORT), &both, hidden),
            ("an outsider by the NodePort", outside, (WINDOWS, NODE_PORT), &both, hidden),
            // Always with direct server return, and to servers of the node only.
            (
                "an outsider by the local NodePort",
                outside,
                (WINDOWS, LOCAL_NODE_PORT),
                &BTreeSet::from([SERVER]),
                OUTSIDE,
            ),
        ] {
            let (seen, sources) = self.seen(from, address, port).context(what)?;
            ensure!(seen == *servers, "{what}: {seen:?} serve, not {servers:?}");
            ensure!(sources == BTreeSet::from([source]), "{what}: servers see {sources:?}, not {source}");
        }
        Ok(())
    }

    /// The servers of many connections, and the clients' addresses that they see.
    fn seen(
        &self,
        from: &NetNs,
        to: Ipv4Addr,
        port: u16,
    ) -> Result<(BTreeSet<Ipv4Addr>, BTreeSet<Ipv4Addr>)> {
        let listen = |namespace: &NetNs, address: Ipv4Addr| -> Result<TcpListener> {
            let listener = namespace.run(|| TcpListener::bind((address, TARGET)))??;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        let servers = [(SERVER, listen(&self.server, SERVER)?), (FAR, listen(&self.underlay.linux, FAR)?)];
        let (mut seen, mut sources) = (BTreeSet::new(), BTreeSet::new());
        for _ in 0..MANY {
            let client = from.run(|| TcpStream::connect_timeout(&(to, port).into(), PATIENCE))??;
            let (server, accepted) = accept(&servers, PATIENCE)?.context("no server gets the connection")?;
            let IpAddr::V4(source) = accepted.peer_addr()?.ip() else { bail!("IPv6") };
            greet(client, accepted)?;
            seen.insert(server);
            sources.insert(source);
        }
        Ok((seen, sources))
    }

    fn start(&self, program: &Path, flags: &[String], direct: bool) -> Result<Killed> {
        start(program, &self.machine, &self.kube, &self.underlay, flags, direct)
    }

    fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        Ok(self.underlay.windows.run(|| self.kube.kubectl(arguments))??)
    }

    /// Makes an object be so.
    fn create(&self, what: &str, object: &Value) -> Result<()> {
        let applied = self.underlay.windows.run(|| self.kube.apply(&object.to_string()))?;
        applied.map(drop).with_context(|| what.to_owned())
    }

    fn balancers(&self) -> Result<Vec<LoadBalancer>> {
        balancers(&self.hns)
    }

    /// The backends of a Service's address.
    fn backends(&self, vip: Ipv4Addr) -> Result<Vec<Guid>> {
        self.backends_if(|balancer| balancer.frontend_vips == [vip.to_string()])
    }

    /// The backends of a port of the node.
    fn backends_of_port(&self, port: u16) -> Result<Vec<Guid>> {
        self.backends_if(|it| {
            it.frontend_vips.is_empty() && it.port_mappings.iter().any(|it| it.external_port == port)
        })
    }

    fn backends_if(&self, is_it: impl Fn(&LoadBalancer) -> bool) -> Result<Vec<Guid>> {
        let found = self.balancers()?.into_iter().find(is_it);
        Ok(found.map(|balancer| balancer.host_compute_endpoints).unwrap_or_default())
    }

    fn log(&self) -> String {
        fs::read_to_string(self.machine.outside().join(LOG)).unwrap_or_default()
    }

    fn until(&self, what: &str, is_so: impl FnMut() -> Result<bool>) -> Result<()> {
        let waited = wait::until(what, PATIENCE, is_so);
        waited.with_context(|| format!("the load balancers: {:?}", self.balancers()))
    }
}

/// Starts kube-proxy on the Windows node.
fn start(
    program: &Path,
    machine: &Prefix,
    kube: &KubeApi,
    underlay: &Underlay,
    flags: &[String],
    direct: bool,
) -> Result<Killed> {
    let log = File::create(machine.outside().join(LOG))?;
    let mut command = machine.command(program);
    let kubeconfig = windows_kubeconfig(kube, machine.outside())?;
    command.arg(format!("--kubeconfig={}", windows_path(&kubeconfig)));
    // The last flag of a name counts.
    command.args(flags);
    command.arg(format!("--enable-dsr={direct}")).arg("--v=4");
    underlay.windows.enter_on_spawn(&mut command)?;
    Ok(Killed(command.stdout(log.try_clone()?).stderr(log).spawn()?))
}

fn balancers(hns: &Hns) -> Result<Vec<LoadBalancer>> {
    let call = Call::Enumerate { kind: Kind::LoadBalancer, query: String::new() };
    let ids: Vec<Guid> = serde_json::from_str(&tortie_hcn::Hcn::call(&*hns.emulator, &call)?)?;
    let mut found = Vec::new();
    for id in ids {
        let call = Call::Query { kind: Kind::LoadBalancer, id, query: String::new() };
        match tortie_hcn::Hcn::call(&*hns.emulator, &call) {
            Ok(text) => found.push(lenient(&text)?),
            // kube-proxy has deleted it meanwhile.
            Err(failure) if failure.code == HResult::ERROR_NOT_FOUND => {}
            Err(failure) => return Err(failure.into()),
        }
    }
    Ok(found)
}

/// The connection that one of the servers gets, if one gets it.
fn accept(servers: &[(Ipv4Addr, TcpListener)], patience: Duration) -> Result<Option<(Ipv4Addr, TcpStream)>> {
    let end = Instant::now() + patience;
    while Instant::now() < end {
        for (address, listener) in servers {
            match listener.accept() {
                Ok((stream, _)) => return Ok(Some((*address, stream))),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(None)
}

/// Data passes in both directions.
fn greet(mut client: TcpStream, mut server: TcpStream) -> Result<()> {
    server.set_nonblocking(false)?;
    client.set_read_timeout(Some(PATIENCE))?;
    server.set_read_timeout(Some(PATIENCE))?;
    let mut heard = [0; 5];
    client.write_all(b"hello")?;
    server.read_exact(&mut heard)?;
    server.write_all(&heard)?;
    client.read_exact(&mut heard)?;
    ensure!(&heard == b"hello", "{heard:?}");
    Ok(())
}

/// The network, as an agent makes it.
fn network(mode: &NetworkMode) -> Value {
    if *mode == NetworkMode::L2Bridge {
        let subnet = json!({"IpAddressPrefix": BLOCK, "Routes": [{"NextHop": GATEWAY, "DestinationPrefix": "0.0.0.0/0"}]});
        return json!({"Name": "pods", "Type": "L2Bridge", "Ipams": [{"Type": "Static", "Subnets": [subnet]}],
            "SchemaVersion": {"Major": 2, "Minor": 0}});
    }
    let subnet = json!({"IpAddressPrefix": BLOCK, "Routes": [{"NextHop": GATEWAY, "DestinationPrefix": "0.0.0.0/0"}],
        "Policies": [{"Type": "VSID", "Settings": {"IsolationId": VNI}}]});
    let remote = json!({"DestinationPrefix": LINUX_BLOCK, "IsolationId": VNI, "ProviderAddress": LINUX,
        "DistributedRouterMacAddress": LINUX_MAC.dashed()});
    json!({"Name": "pods", "Type": "Overlay", "Ipams": [{"Type": "Static", "Subnets": [subnet]}],
        "Policies": [{"Type": "HostRoute", "Settings": {}}, {"Type": "RemoteSubnetRoute", "Settings": remote}],
        "SchemaVersion": {"Major": 2, "Minor": 0}})
}

fn pod(hns: &Hns, network: Guid, gateway: Ipv4Addr, address: Ipv4Addr) -> Result<NetNs> {
    let [a, b, c, d] = address.octets();
    let document = json!({"IpConfigurations": [{"IpAddress": address}],
        "MacAddress": format!("0E-2A-{a:02x}-{b:02x}-{c:02x}-{d:02x}"),
        "Routes": [{"NextHop": gateway, "DestinationPrefix": "0.0.0.0/0"}]});
    let endpoint = create(hns, Kind::Endpoint, network, &document)?;
    let compartment = hns.emulator.create_namespace(&Namespace::default())?;
    let container = NetNs::create()?;
    bind_compartment(&*hns.emulator, compartment, Some(&path_of(&container)))?;
    let attach =
        tortie_hcn::schema::Modify::namespace_endpoint(tortie_hcn::schema::RequestType::Add, endpoint);
    hns.emulator.modify_namespace(compartment, &attach)?;
    Ok(container)
}

fn create(hns: &Hns, kind: Kind, network: Guid, document: &Value) -> Result<Guid> {
    let call = Call::Create { kind, network, id: Guid::ZERO, settings: document.to_string() };
    Ok(serde_json::from_str(&tortie_hcn::Hcn::call(&*hns.emulator, &call)?)?)
}

/// kube-proxy takes the node's address from here.
fn node(name: &str, os: &str, address: Ipv4Addr) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"kubernetes.io/os": os}},
        "status": {"addresses": [{"type": "InternalIP", "address": address}]}})
}

fn service(name: &str, address: Ipv4Addr, node_port: u16, traffic: &str) -> Value {
    let port = json!({"port": PORT, "targetPort": TARGET, "nodePort": node_port, "protocol": "TCP"});
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"},
        "spec": {"type": "NodePort", "clusterIP": address, "ports": [port], "externalTrafficPolicy": traffic}})
}

/// The backends of a Service, each on a node.
fn slice(service: &str, backends: &[(Ipv4Addr, &str)], (protocol, port): (&str, u16)) -> Value {
    let endpoint = |(address, node): &(Ipv4Addr, &str)| json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true, "serving": true}});
    let endpoints: Vec<Value> = backends.iter().map(endpoint).collect();
    json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4", "endpoints": endpoints,
        "metadata": {"name": service, "namespace": "default", "labels": {"kubernetes.io/service-name": service}},
        "ports": [{"name": "", "port": port, "protocol": protocol}]})
}
