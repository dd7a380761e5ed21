//! kube-proxy for Windows beside Tortie's own agent: `tortie.exe agent` makes the overlay network, pods come by `tortie-cni.exe`, and
//! policy is in force on connections to Services. The Linux node has Tortie's agent, too.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail, ensure};
use ipnet::Ipv4Net;
use serde_json::{Value, json};
use tortie_hcn::schema::{Endpoint, LoadBalancer, Namespace, Network};
use tortie_hcn::{Guid, HcnExt as _, Version};
use tortie_hns_emulator::{Config, EgressSees, Emulator, Survives, bind_compartment};
use tortie_kernel::namespace::NetNs;
use tortie_servers::wine::{HNS_ADDRESS, windows_path};
use tortie_servers::{KubeApi, KubeOptions};

use super::traffic::{MANY, Protocol, Server, Traffic};
use super::{
    LINUX, NODE_PORT, OUTSIDE, PATIENCE, PORT, TARGET, VIP, WINDOWS, balancers, greet, node, service, slice,
    start,
};
use crate::cluster::{Hns, NODE, windows_kubeconfig};
use crate::frames::path_of;
use crate::linux_node::{self, Daemon, LINUX_NODE, add_pod, address};
use crate::prefix::{Killed, Prefix, output, plugin_output};
use crate::underlay::Underlay;
use crate::wait;
use setup::windows::Built;

/// The name of the agent's network.
const NETWORK: &str = "Calico";
const AGENT_LOG: &str = "agent.log";
/// A Service of UDP, and one whose clients keep their server.
const UDP_VIP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 53);
const STICKY_VIP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 102);
const UDP_TARGET: u16 = 5353;
const UDP_NODE_PORT: u16 = 30_053;

/// How clients reach the Services.
type Target = (Protocol, Ipv4Addr, u16);
const CLUSTER_IP: Target = (Protocol::Tcp, VIP, PORT);
const OF_NODE: Target = (Protocol::Tcp, WINDOWS, NODE_PORT);
const DATAGRAMS: Target = (Protocol::Udp, UDP_VIP, PORT);
const DATAGRAMS_OF_NODE: Target = (Protocol::Udp, WINDOWS, UDP_NODE_PORT);
const STICKY: Target = (Protocol::Tcp, STICKY_VIP, PORT);

/// The programs of both nodes.
pub(super) struct Programs<'a> {
    pub(super) built: &'a Built,
    pub(super) kube_proxy: PathBuf,
    /// `tortie` for Linux.
    pub(super) tortie: PathBuf,
}

/// A Windows node and a Linux node with Tortie's agents, a machine outside, and an API server on the loopback of the Windows node.
struct Cluster<'a> {
    // Fields are dropped in this order.
    agent: RefCell<Option<Killed>>,
    linux: Option<Daemon>,
    programs: &'a Programs<'a>,
    machine: Prefix,
    kube: KubeApi,
    hns: Hns,
    egress_sees: EgressSees,
    underlay: Underlay,
}

/// A pod, and its namespace in HNS on the Windows node.
struct Pod {
    name: &'static str,
    namespace: Guid,
    container: NetNs,
    address: Ipv4Addr,
}

/// The pods: two clients and a server on the Windows node, and a server on the Linux node.
struct Pods {
    client: Pod,
    stranger: Pod,
    server: Pod,
    far: Pod,
}

impl Pods {
    /// The addresses of the servers.
    fn both(&self) -> [Ipv4Addr; 2] {
        [self.server.address, self.far.address]
    }

    fn traffic<'a>(&'a self, from: &'a NetNs, (protocol, address, port): Target) -> Traffic<'a> {
        let servers = [&self.server, &self.far].map(|pod| Server {
            namespace: &pod.container,
            address: pod.address,
            tcp: TARGET,
            udp: UDP_TARGET,
        });
        Traffic { from, protocol, to: (address, port), servers: servers.into() }
    }
}

/// Runs everything with one version of HNS, with or without direct server return.
pub(super) fn run(programs: &Programs<'_>, version: Version, direct: bool) -> Result<()> {
    let cluster = Cluster::new(programs, version)?;
    cluster.run(direct).with_context(|| cluster.log())
}

impl<'a> Cluster<'a> {
    fn new(programs: &'a Programs<'a>, version: Version) -> Result<Self> {
        let underlay = Underlay::new([WINDOWS, LINUX, OUTSIDE])?;
        // Nobody knows what ACLs see; Server 2022 has the other guess here.
        let egress_sees = if version == Config::SERVER_2022 { EgressSees::Vip } else { EgressSees::Backend };
        let config = Config { egress_sees, ..Config::as_hns(version, WINDOWS) };
        let emulator = Emulator::with_switch(config, NetNs::open(&path_of(&underlay.windows))?)?;
        // Programs under Wine have the loopback of the node.
        let hns = underlay.windows.run(|| Hns::serve(emulator))??;
        let kube = underlay.windows.run(|| KubeApi::start(&KubeOptions::default()))??;
        linux_node::relay(&underlay, kube.port())?;
        let machine = Prefix::new(&programs.built.libraries, (HNS_ADDRESS, &hns.address.to_string()))?;
        let agent = RefCell::default();
        let mut cluster = Self { agent, linux: None, programs, machine, kube, hns, egress_sees, underlay };
        cluster.prepare()?;
        let folder = cluster.machine.outside();
        let command = linux_node::agent(&programs.tortie, &cluster.kube, folder, &[]);
        cluster.linux = Some(Daemon::start(command, &cluster.underlay, folder)?);
        Ok(cluster)
    }

    /// Creates what a cluster has before pods come.
    fn prepare(&self) -> Result<()> {
        let kube = &self.kube;
        self.underlay.windows.run(|| kube.create_definitions())??;
        let pool =
            json!({"cidr": "10.244.0.0/16", "blockSize": 26, "vxlanMode": "Always", "ipipMode": "Never"});
        let ipam = json!({"strictAffinity": true, "autoAllocateBlocks": true, "maxBlocksPerHost": 0});
        for (kind, name, spec) in [("IPPool", "pods", pool), ("IPAMConfig", "default", ipam)] {
            self.apply(&json!({"apiVersion": "crd.projectcalico.org/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}))?;
        }
        self.apply(&node(NODE, "windows", WINDOWS))?;
        self.apply(&node(LINUX_NODE, "linux", LINUX))
    }

    fn run(&self, direct: bool) -> Result<()> {
        self.start_agent()?;
        let pods = self.add_pods()?;
        self.create_services(&pods)?;
        let _proxy = self.start_kube_proxy(direct)?;
        self.until("a load balancer for each address of a Service", || Ok(self.balancers()?.len() == 5))?;
        self.source_vip_is_reserved()?;
        self.everybody_connects(&pods, direct).context("without policy")?;
        self.ingress_policy(&pods, direct).context("a policy of servers")?;
        self.egress_policies(&pods, direct).context("policies of clients")?;
        self.restarts(&pods, direct)?;
        self.a_server_goes(&pods, direct).context("a server goes")?;
        self.end(&pods)
    }

    /// Without policy, every client reaches both servers by each address.
    fn everybody_connects(&self, pods: &Pods, direct: bool) -> Result<()> {
        let Underlay { windows, outside, .. } = &self.underlay;
        let (client, stranger) = (&pods.client, &pods.stranger);
        let (hidden, gateway) = (self.source_vip()?, self.gateway()?);
        let of = |own: Ipv4Addr| if direct { own } else { hidden };
        for (what, from, to, source) in [
            ("a pod by the ClusterIP", &client.container, CLUSTER_IP, of(client.address)),
            ("another pod by the ClusterIP", &stranger.container, CLUSTER_IP, of(stranger.address)),
            ("the node by the ClusterIP", windows, CLUSTER_IP, of(gateway)),
            ("a pod by the NodePort", &client.container, OF_NODE, hidden),
            ("the node by the NodePort", windows, OF_NODE, hidden),
            ("an outsider by the NodePort", outside, OF_NODE, hidden),
            ("a pod by UDP", &client.container, DATAGRAMS, of(client.address)),
            ("a pod by UDP and NodePort", &client.container, DATAGRAMS_OF_NODE, hidden),
            ("the node by UDP", windows, DATAGRAMS, of(gateway)),
            ("an outsider by UDP", outside, DATAGRAMS_OF_NODE, hidden),
        ] {
            pods.traffic(from, to).reaches(&pods.both(), source).context(what)?;
        }
        // With session affinity, a client keeps its server.
        for client in [client, stranger] {
            let seen = pods.traffic(&client.container, STICKY).exchange(MANY, PATIENCE)?;
            ensure!(seen.servers.len() == 1 && seen.failed == 0, "affinity of {}: {seen:?}", client.name);
        }
        Ok(())
    }

    /// Servers that allow one client see it with direct server return only. Otherwise they refuse both, and the condition says why,
    /// until they allow the source VIP: then they cannot refuse either.
    fn ingress_policy(&self, pods: &Pods, direct: bool) -> Result<()> {
        let allow = |from: Value| {
            let ports = json!([{"port": TARGET, "protocol": "TCP"}]);
            let spec = json!({"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"],
                "ingress": [{"from": from, "ports": ports}]});
            self.apply(&policy("web", &spec))
        };
        let one = json!({"podSelector": {"matchLabels": {"role": "client"}}});
        allow(json!([one]))?;
        let [client, stranger] =
            [&pods.client, &pods.stranger].map(|pod| pods.traffic(&pod.container, CLUSTER_IP));
        stranger.is_refused().context("the stranger")?;
        if direct {
            client.reaches(&pods.both(), pods.client.address).context("the client")?;
        } else {
            client.is_refused().context("the client, whom servers do not see")?;
            self.until("the condition ClientAddressHidden", || {
                let report = self.kubectl(&["get", "nodereports", NODE, "-o", "json"])?;
                Ok(report.contains("ClientAddressHidden") && report.contains("default/web"))
            })?;
            let hidden = self.source_vip()?;
            allow(json!([one, {"ipBlock": {"cidr": format!("{hidden}/32")}}]))?;
            for traffic in [client, stranger] {
                traffic.reaches(&pods.both(), hidden).context("a client behind the source VIP")?;
            }
        }
        self.kubectl(&["delete", "networkpolicy", "web"]).map(drop)
    }

    /// One client may reach the servers, the other one may not, whichever address they use, and whatever servers see.
    fn egress_policies(&self, pods: &Pods, direct: bool) -> Result<()> {
        let to = |app: &str| {
            json!([{"to": [{"podSelector": {"matchLabels": {"app": app}}}],
                "ports": [{"port": TARGET, "protocol": "TCP"}, {"port": UDP_TARGET, "protocol": "UDP"}]}])
        };
        for (role, app) in [("client", "web"), ("stranger", "other")] {
            let spec = json!({"podSelector": {"matchLabels": {"role": role}}, "policyTypes": ["Egress"], "egress": to(app)});
            self.apply(&policy(role, &spec))?;
        }
        self.egress_is_enforced(pods, direct)
    }

    fn egress_is_enforced(&self, pods: &Pods, direct: bool) -> Result<()> {
        let (hidden, gateway) = (self.source_vip()?, self.gateway()?);
        let of = |own: Ipv4Addr| if direct { own } else { hidden };
        for (what, to) in [("the ClusterIP", CLUSTER_IP), ("the NodePort", OF_NODE), ("UDP", DATAGRAMS)] {
            let stranger = pods.traffic(&pods.stranger.container, to);
            stranger.is_refused().with_context(|| format!("the stranger by {what}"))?;
        }
        let (client, node) = (&pods.client, &self.underlay.windows);
        for (what, from, to, source) in [
            ("the client by the ClusterIP", &client.container, CLUSTER_IP, of(client.address)),
            ("the client by UDP", &client.container, DATAGRAMS, of(client.address)),
            ("the node by the ClusterIP", node, CLUSTER_IP, of(gateway)),
            ("the node by the NodePort", node, OF_NODE, hidden),
        ] {
            pods.traffic(from, to).reaches(&pods.both(), source).context(what)?;
        }
        // The policy does not allow the node's address.
        let by_port = pods.traffic(&client.container, OF_NODE);
        let judged = match self.egress_sees {
            EgressSees::Backend => by_port.reaches(&pods.both(), hidden),
            EgressSees::Vip => by_port.is_refused(),
        };
        judged.context("the client by the NodePort")
    }

    /// Neither a restart of HNS, nor one of the agent, nor a new pod changes what kube-proxy has made, or what policy says. An agent
    /// that is away and comes back cuts no connection.
    fn restarts(&self, pods: &Pods, direct: bool) -> Result<()> {
        let before = self.of_kube_proxy()?;
        let remote = before.1.iter().filter(|endpoint| endpoint.is_remote()).count();
        ensure!(remote > 0, "kube-proxy has made no remote endpoint: {:?}", before.1);
        for survives in [Survives::Everything, Survives::AllButAcls] {
            self.hns.emulator.restart(survives)?;
            self.hns.service.disconnect();
            self.egress_is_enforced(pods, direct)
                .with_context(|| format!("after a restart of HNS: {survives:?}"))?;
        }
        let kept = pods.traffic(&pods.client.container, CLUSTER_IP).open()?;
        self.agent.borrow_mut().take();
        self.egress_is_enforced(pods, direct).context("without the agent")?;
        self.start_agent()?;
        self.egress_is_enforced(pods, direct).context("after a restart of the agent")?;
        let [client, server] = kept;
        greet(client, server).context("the connection from before the agent's restart")?;
        let late = self.add("late", ("app", "late"))?;
        let source = if direct { late.address } else { self.source_vip()? };
        pods.traffic(&late.container, CLUSTER_IP)
            .reaches(&pods.both(), source)
            .context("a pod that comes later")?;
        self.plugin("DEL", late.name, late.namespace)?;
        let after = self.of_kube_proxy()?;
        ensure!(before == after, "restarts have changed {before:?} to {after:?}");
        Ok(())
    }

    /// The load balancers, and the endpoints that are no pods'.
    fn of_kube_proxy(&self) -> Result<(Vec<LoadBalancer>, Vec<Endpoint>)> {
        let endpoints = self.hns.emulator.endpoints_of_network(self.network()?.id)?;
        let of_others = endpoints.into_iter().filter(|it| it.host_compute_namespace.is_zero());
        Ok((self.balancers()?, of_others.collect()))
    }

    /// A server's endpoint goes before kube-proxy knows, as that of every pod does.
    fn a_server_goes(&self, pods: &Pods, direct: bool) -> Result<()> {
        self.plugin("DEL", pods.server.name, pods.server.namespace)?;
        self.kubectl(&["delete", "pod", pods.server.name, "--force", "--grace-period=0"])?;
        self.apply(&slice("web", &[(pods.far.address, LINUX_NODE)], ("TCP", TARGET)))?;
        let mut traffic = pods.traffic(&pods.client.container, CLUSTER_IP);
        traffic.servers.retain(|server| server.address == pods.far.address);
        let source = if direct { pods.client.address } else { self.source_vip()? };
        traffic.reaches(&[pods.far.address], source)
    }

    /// Nothing is left of pods and Services.
    fn end(&self, pods: &Pods) -> Result<()> {
        self.kubectl(&["delete", "service", "web", "datagrams", "sticky"])?;
        self.until("no load balancer is left", || Ok(self.balancers()?.is_empty()))?;
        for pod in [&pods.client, &pods.stranger] {
            self.plugin("DEL", pod.name, pod.namespace)?;
        }
        let vip = self.source_vip()?.to_string();
        self.until("only the source VIP and the address of the API's Service are left", || {
            let left = self.hns.emulator.endpoints_of_network(self.network()?.id)?;
            let left: BTreeSet<&str> =
                left.iter().flat_map(|it| &it.ip_configurations).map(|it| it.ip_address.as_str()).collect();
            Ok(left == BTreeSet::from([vip.as_str(), "10.96.0.1"]))
        })?;
        self.until("no handle is open", || Ok(self.hns.service.open_handles().is_empty()))
    }
}

/// The programs and objects of the cluster.
impl Cluster<'_> {
    /// Starts the agent of the Windows node, also instead of one that runs, and waits until it serves.
    fn start_agent(&self) -> Result<()> {
        self.agent.borrow_mut().take();
        let folder = self.machine.outside();
        let configuration = self.machine.drive().join("etc/cni/net.d").join(tortie_deploy::CNI_CONFIG_FILE);
        if configuration.exists() {
            fs::remove_file(&configuration)?;
        }
        let kubeconfig = windows_kubeconfig(&self.kube, folder)?;
        let mut command = self.machine.command(&self.programs.built.tortie());
        command.args(["agent", "--node", NODE, "--service-cidr", "10.96.0.0/12"]);
        command.arg("--store").arg(format!("kubernetes:{}", windows_path(&kubeconfig)));
        command.args(["--cni-conf-dir", r"C:\etc\cni\net.d"]);
        self.underlay.windows.enter_on_spawn(&mut command)?;
        let log = File::options().create(true).append(true).open(folder.join(AGENT_LOG))?;
        let agent = Killed(command.stdout(Stdio::null()).stderr(log).spawn()?);
        *self.agent.borrow_mut() = Some(agent);
        self.until("the agent serves", || Ok(configuration.exists()))
    }

    /// Starts kube-proxy with the flags that `tortie windows kube-proxy` prints.
    fn start_kube_proxy(&self, direct: bool) -> Result<Killed> {
        let mut command = self.machine.command(&self.programs.built.tortie());
        command.args(["windows", "kube-proxy", "--node", NODE]);
        self.underlay.windows.enter_on_spawn(&mut command)?;
        let flags = String::from_utf8(output(&mut command)?.stdout)?;
        let flags: Vec<String> = flags.lines().map(str::to_owned).collect();
        start(&self.programs.kube_proxy, &self.machine, &self.kube, &self.underlay, &flags, direct)
    }

    fn add_pods(&self) -> Result<Pods> {
        self.apply(&pod("far", LINUX_NODE, ("app", "web")))?;
        let (container, address) =
            add_pod(&self.programs.tortie, &self.underlay, self.machine.outside(), "far")?;
        Ok(Pods {
            client: self.add("client", ("role", "client"))?,
            stranger: self.add("stranger", ("role", "stranger"))?,
            server: self.add("server", ("app", "web"))?,
            far: Pod { name: "far", namespace: Guid::ZERO, container, address },
        })
    }

    /// Creates and connects a pod of the Windows node.
    fn add(&self, name: &'static str, label: (&str, &str)) -> Result<Pod> {
        self.apply(&pod(name, NODE, label))?;
        let namespace = self.hns.service.create_namespace(&Namespace::default())?;
        let result = self.plugin("ADD", name, namespace)?;
        let container = NetNs::create()?;
        bind_compartment(&*self.hns.service, namespace, Some(&path_of(&container)))?;
        Ok(Pod { name, namespace, container, address: address(&result)? })
    }

    /// Runs the plugin as a runtime does, and returns its document.
    fn plugin(&self, command: &str, pod: &str, namespace: Guid) -> Result<Value> {
        let input = self.machine.outside().join("input");
        fs::write(&input, json!({"cniVersion": "1.0.0", "name": "net", "type": "tortie-cni"}).to_string())?;
        let mut plugin = self.machine.command(&self.programs.built.plugin());
        plugin.stdin(File::open(&input)?).env("CNI_COMMAND", command).env("CNI_IFNAME", "eth0");
        plugin.env("CNI_CONTAINERID", pod).env("CNI_NETNS", namespace.to_string());
        plugin.env("CNI_PATH", r"C:\opt\cni\bin");
        plugin.env("CNI_ARGS", format!("K8S_POD_NAMESPACE=default;K8S_POD_NAME={pod}"));
        self.underlay.windows.enter_on_spawn(&mut plugin)?;
        let printed = plugin_output(&mut plugin)?.stdout;
        Ok(if printed.is_empty() { Value::Null } else { serde_json::from_slice(&printed)? })
    }

    /// A Service with a NodePort, one of UDP, and one with session affinity, each with both servers.
    fn create_services(&self, pods: &Pods) -> Result<()> {
        let backends = [(pods.server.address, NODE), (pods.far.address, LINUX_NODE)];
        let object = |name: &str, spec: Value| json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default"}, "spec": spec});
        let datagrams =
            json!({"port": PORT, "targetPort": UDP_TARGET, "nodePort": UDP_NODE_PORT, "protocol": "UDP"});
        let sticky = json!({"port": PORT, "targetPort": TARGET, "protocol": "TCP"});
        self.apply(&service("web", VIP, NODE_PORT, "Cluster"))?;
        self.apply(&object(
            "datagrams",
            json!({"type": "NodePort", "clusterIP": UDP_VIP, "ports": [datagrams]}),
        ))?;
        self.apply(&object(
            "sticky",
            json!({"clusterIP": STICKY_VIP, "sessionAffinity": "ClientIP", "ports": [sticky]}),
        ))?;
        for (name, protocol, target) in
            [("web", "TCP", TARGET), ("datagrams", "UDP", UDP_TARGET), ("sticky", "TCP", TARGET)]
        {
            self.apply(&slice(name, &backends, (protocol, target)))?;
        }
        Ok(())
    }

    /// kube-proxy's endpoint has the address that IPAM keeps free in the node's block.
    fn source_vip_is_reserved(&self) -> Result<()> {
        let vip = self.source_vip()?;
        let network = self.network()?;
        let endpoints = self.hns.emulator.endpoints_of_network(network.id)?;
        let is_vip = |it: &Endpoint| it.ip_configurations.iter().any(|own| own.ip_address == vip.to_string());
        ensure!(
            endpoints.iter().any(|it| is_vip(it) && !it.is_remote()),
            "no endpoint has {vip}: {endpoints:?}"
        );
        let blocks = self.kubectl(&["get", "ipamblocks.crd.projectcalico.org", "-o", "json"])?;
        let blocks: Value = serde_json::from_str(&blocks)?;
        let cidr: Ipv4Net = network.subnets().next().context("no subnet")?.ip_address_prefix.parse()?;
        let blocks = blocks["items"].as_array().context("no blocks")?;
        let block = blocks.iter().map(|it| &it["spec"]).find(|it| it["cidr"] == cidr.to_string());
        let block = block.with_context(|| format!("no block {cidr}"))?;
        let position = usize::try_from(u32::from(vip) - u32::from(cidr.network()))?;
        let holder = block["allocations"][position].as_u64().with_context(|| format!("{vip} is free"))?;
        let handle = &block["attributes"][usize::try_from(holder)?]["handle_id"];
        ensure!(handle == "windows-reserved-ipam-handle", "{handle} has the source VIP");
        Ok(())
    }

    fn source_vip(&self) -> Result<Ipv4Addr> {
        Ok(tortie_windows::source_vip(&self.network()?)?)
    }

    /// The address by which the node's own packets come.
    fn gateway(&self) -> Result<Ipv4Addr> {
        Ok(Ipv4Addr::from(u32::from(self.source_vip()?) - 1))
    }

    fn network(&self) -> Result<Network> {
        self.hns.emulator.network_by_name(NETWORK)?.context("the agent has made no network")
    }

    fn balancers(&self) -> Result<Vec<LoadBalancer>> {
        balancers(&self.hns)
    }

    fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        let kube = &self.kube;
        Ok(self.underlay.windows.run(|| kube.kubectl(arguments))??)
    }

    fn apply(&self, object: &Value) -> Result<()> {
        let kube = &self.kube;
        let applied = self.underlay.windows.run(|| kube.apply(&object.to_string()))?;
        applied.map(drop).with_context(|| object.to_string())
    }

    fn until(&self, what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
        let waited = wait::until(what, PATIENCE, || {
            if let Some(Killed(agent)) = &mut *self.agent.borrow_mut()
                && let Some(status) = agent.try_wait()?
            {
                bail!("the agent has ended: {status}");
            }
            is_so()
        });
        waited.with_context(|| format!("the load balancers: {:?}", self.balancers()))
    }

    fn log(&self) -> String {
        let read = |name: &str| fs::read_to_string(self.machine.outside().join(name)).unwrap_or_default();
        let [agent, linux, proxy] = [AGENT_LOG, linux_node::LOG, super::LOG].map(read);
        format!("The agent:\n{agent}\nThe agent of the Linux node:\n{linux}\nkube-proxy:\n{proxy}")
    }
}

fn pod(name: &str, node: &str, (label, value): (&str, &str)) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {label: value}},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]}})
}

/// A policy of the namespace of the pods.
fn policy(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": name, "namespace": "default"}, "spec": spec})
}
