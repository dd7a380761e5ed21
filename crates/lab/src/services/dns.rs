//! The cluster's DNS: a pod in kube-system, which exists as soon as somebody has a Service. Its process answers for
//! `cluster.local` from the Services and their slices, and for nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use serde_json::{Value, json};
use simple_dns::rdata::{A, CNAME, RData};
use simple_dns::{CLASS, Name, Packet, PacketFlag, QTYPE, RCODE, ResourceRecord, TYPE};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tortie_api::kubernetes::EndpointSlice;
use tortie_api::{Key, Kind, Resource};
use tortie_store::{Cache, Interest, Store, Stored, Write};

use crate::{LabDir, LabError};

/// The address of the DNS, as kubeadm chooses it.
pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
/// The image of the pod whose process is this server.
pub(crate) const IMAGE: &str = "tortie.io/lab-dns";
const PORT: u16 = 53;
const NAMESPACE: &str = "kube-system";
const DOMAIN: &str = "cluster.local";
/// How long clients may keep an answer, in seconds. CoreDNS says the same.
const TTL: u32 = 5;
/// How long a client may keep a TCP connection without a question, or without reading an answer.
const IDLE: Duration = Duration::from_secs(10);
/// The maximum number of TCP connections.
const CONNECTIONS: usize = 64;
/// What a client takes by UDP without EDNS (RFC 1035).
const MAX_UDP: usize = 512;

/// What decides whether the pod must exist.
pub(crate) const KINDS: [Kind; 5] =
    [Kind::Namespace, Kind::ServiceAccount, Kind::Node, Kind::Service, Kind::Deployment];

/// The writes after which the DNS exists, if there are Services and a Linux node for its pod.
pub(crate) fn missing_writes(objects: &[&Stored]) -> Vec<Write> {
    let is_linux = |stored: &&&Stored| {
        stored.key.kind == Kind::Node && stored.value["metadata"]["labels"]["kubernetes.io/os"] == "linux"
    };
    let mut services = objects.iter().filter(|stored| stored.key.kind == Kind::Service);
    let is_needed = services.any(|stored| stored.key.namespace != NAMESPACE)
        && objects.iter().any(|stored| is_linux(&stored));
    let keys: BTreeSet<&Key> = objects.iter().map(|stored| &stored.key).collect();
    // The pod runs where its namespace is.
    let wanted = own_objects().into_iter().filter(|(key, _)| is_needed && !keys.contains(key));
    wanted.map(|(key, value)| Write::Create(key, value)).collect()
}

fn own_objects() -> Vec<(Key, Value)> {
    let labels = json!({"k8s-app": "kube-dns"});
    let metadata = |name: &str| json!({"name": name, "namespace": NAMESPACE, "labels": labels});
    let port =
        |name: &str, protocol: &str| json!({"name": name, "protocol": protocol, "containerPort": PORT});
    let service_port = |name: &str, protocol: &str| json!({"name": name, "protocol": protocol, "port": PORT});
    vec![
        (
            Key::global(Kind::Namespace, NAMESPACE),
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {
                "name": NAMESPACE, "labels": {"kubernetes.io/metadata.name": NAMESPACE}}}),
        ),
        (
            Key::namespaced(Kind::ServiceAccount, NAMESPACE, "coredns"),
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "coredns", "namespace": NAMESPACE}}),
        ),
        (
            Key::namespaced(Kind::Service, NAMESPACE, "kube-dns"),
            json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata("kube-dns"), "spec": {
                "clusterIP": ADDRESS, "clusterIPs": [ADDRESS], "selector": labels,
                "ports": [service_port("dns", "UDP"), service_port("dns-tcp", "TCP")]}}),
        ),
        (
            Key::namespaced(Kind::Deployment, NAMESPACE, "coredns"),
            json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata("coredns"), "spec": {
                "replicas": 1, "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": {
                    "serviceAccountName": "coredns", "nodeSelector": {"kubernetes.io/os": "linux"},
                    "tolerations": [{"operator": "Exists"}],
                    "containers": [{"name": "coredns", "image": IMAGE, "ports": [port("dns", "UDP"), port("dns-tcp", "TCP")]}]}}}}),
        ),
    ]
}

/// Whether a pod is this server.
pub(crate) fn is_server(pod: &Value) -> bool {
    let containers = pod["spec"]["containers"].as_array();
    containers.into_iter().flatten().any(|container| container["image"] == IMAGE)
}

/// The text of `/etc/resolv.conf` in the pods of a namespace.
pub(crate) fn resolver(namespace: &str) -> String {
    format!(
        "nameserver {ADDRESS}\nsearch {namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}\noptions ndots:5 timeout:1 attempts:3\n"
    )
}

/// Runs the server of a lab until it is killed; prints `ready` when it answers.
///
/// # Errors
/// The port is taken, or the lab's datastore is gone.
pub fn serve(dir: &LabDir) -> Result<(), LabError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(LabError::io("starting the DNS"))?.block_on(async {
        let listening = || LabError::io(format!("listening on port {PORT}"));
        let udp = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).await.map_err(listening())?;
        let tcp = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).await.map_err(listening())?;
        let store = crate::client(dir);
        let kinds = [Kind::Service, Kind::EndpointSlice];
        let mut cache = Cache::new(&store as &dyn Store, kinds.map(Interest::all).to_vec());
        cache.complete().await?;
        let zone: SharedZone = Arc::new(RwLock::new(Zone::of(&cache.objects().collect::<Vec<_>>())));
        tokio::spawn(answer_datagrams(udp, zone.clone()));
        tokio::spawn(answer_connections(tcp, zone.clone()));
        writeln!(std::io::stdout(), "ready").map_err(LabError::io("reporting that the DNS is ready"))?;
        loop {
            cache.changed().await?;
            *zone.write().unwrap_or_else(PoisonError::into_inner) =
                Zone::of(&cache.objects().collect::<Vec<_>>());
        }
    })
}

type SharedZone = Arc<RwLock<Zone>>;

async fn answer_datagrams(socket: UdpSocket, zone: SharedZone) {
    let mut buffer = [0; 4096];
    loop {
        let Ok((length, client)) = socket.recv_from(&mut buffer).await else { continue };
        let reply =
            zone.read().unwrap_or_else(PoisonError::into_inner).reply(&buffer[..length], Some(MAX_UDP));
        if let Some(reply) = reply {
            // A client that is gone asks nobody again.
            let _ = socket.send_to(&reply, client).await;
        }
    }
}

async fn answer_connections(listener: TcpListener, zone: SharedZone) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else { continue };
        let zone = zone.clone();
        tokio::spawn(async move {
            let _ = answer_connection(stream, &zone).await;
            drop(place);
        });
    }
}

/// Questions and answers with their length before them (RFC 1035, 4.2.2).
async fn answer_connection(mut stream: TcpStream, zone: &SharedZone) -> std::io::Result<()> {
    loop {
        let length = tokio::time::timeout(IDLE, stream.read_u16()).await??;
        let mut question = vec![0; usize::from(length)];
        tokio::time::timeout(IDLE, stream.read_exact(&mut question)).await??;
        let reply = zone.read().unwrap_or_else(PoisonError::into_inner).reply(&question, None);
        let Some(reply) = reply else { return Ok(()) };
        let length = u16::try_from(reply.len()).map_err(std::io::Error::other)?;
        let reply = [&length.to_be_bytes()[..], &reply].concat();
        // A client that does not read must not keep its place for ever.
        tokio::time::timeout(IDLE, stream.write_all(&reply)).await??;
    }
}

/// What a name stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Target {
    Addresses(BTreeSet<Ipv4Addr>),
    /// Another name (`ExternalName`).
    Alias(String),
}

/// All names, in lower case and without the last dot.
#[derive(Debug, Default)]
struct Zone(BTreeMap<String, Target>);

impl Zone {
    fn of(objects: &[&Stored]) -> Self {
        let mut names = BTreeMap::new();
        let mut headless = BTreeSet::new();
        for stored in objects {
            let Ok(Resource::Service(service)) = Resource::read(&stored.key, &stored.value) else { continue };
            let name = format!("{}.{}.svc.{DOMAIN}", stored.key.name, stored.key.namespace);
            let alias = stored.value["spec"]["externalName"].as_str();
            let addresses =
                service.cluster_ips().into_iter().filter_map(|address| address.to_string().parse().ok());
            let target = match (service.spec.service_type.as_deref(), alias) {
                (Some("ExternalName"), Some(alias)) => Target::Alias(alias.trim_end_matches('.').to_owned()),
                _ => Target::Addresses(addresses.collect()),
            };
            if stored.value["spec"]["clusterIP"] == "None" {
                headless.insert(name.clone());
            }
            names.insert(name, target);
        }
        for stored in objects {
            let Ok(Resource::EndpointSlice(slice)) = Resource::read(&stored.key, &stored.value) else {
                continue;
            };
            let service =
                format!("{}.{}.svc.{DOMAIN}", slice.service().unwrap_or_default(), stored.key.namespace);
            if headless.contains(&service) {
                add_backends(&mut names, &service, &slice, &stored.value);
            }
        }
        Self(names)
    }

    /// What the name stands for; `None` if it does not exist.
    fn find(&self, name: &str) -> Option<Target> {
        self.0.get(name).cloned().or_else(|| of_pod(name))
    }

    /// Whether names below this one exist: then it exists, too, and has no addresses.
    fn has_below(&self, name: &str) -> bool {
        let end = format!(".{name}");
        self.0.keys().any(|known| known.ends_with(&end))
    }

    /// The answer to a question; `None` if it is none. An answer longer than `most` says that the client should ask by TCP.
    fn reply(&self, question: &[u8], most: Option<usize>) -> Option<Vec<u8>> {
        let query = Packet::parse(question).ok()?;
        if query.has_flags(PacketFlag::RESPONSE) {
            return None;
        }
        let mut reply = Packet::new_reply(query.id());
        reply.set_flags(PacketFlag::AUTHORITATIVE_ANSWER);
        if query.has_flags(PacketFlag::RECURSION_DESIRED) {
            reply.set_flags(PacketFlag::RECURSION_DESIRED);
        }
        let question = query.questions.first()?;
        reply.questions.push(question.clone());
        *reply.rcode_mut() = self.answer(&question.qname, question.qtype, &mut reply.answers);
        let whole = reply.build_bytes_vec_compressed().ok()?;
        if most.is_none_or(|most| whole.len() <= most) {
            return Some(whole);
        }
        reply.answers.clear();
        reply.set_flags(PacketFlag::TRUNCATION);
        reply.build_bytes_vec_compressed().ok()
    }

    fn answer(&self, name: &Name<'_>, kind: QTYPE, answers: &mut Vec<ResourceRecord<'_>>) -> RCODE {
        let text = name.to_string().to_lowercase();
        if text != DOMAIN && !text.ends_with(&format!(".{DOMAIN}")) {
            return RCODE::Refused;
        }
        let record = |data| ResourceRecord::new(name.clone().into_owned(), CLASS::IN, TTL, data);
        match self.find(&text) {
            Some(Target::Addresses(addresses)) if [QTYPE::TYPE(TYPE::A), QTYPE::ANY].contains(&kind) => {
                answers.extend(
                    addresses.into_iter().map(|address| record(RData::A(A { address: address.into() }))),
                );
            }
            Some(Target::Alias(alias)) => match Name::new(&alias) {
                Ok(alias) => answers.push(record(RData::CNAME(CNAME(alias.into_owned())))),
                Err(_) => return RCODE::ServerFailure,
            },
            Some(_) => {}
            None if self.has_below(&text) => {}
            None => return RCODE::NameError,
        }
        RCODE::NoError
    }
}

/// The ready backends of a headless Service, together and each by the name of its pod.
fn add_backends(names: &mut BTreeMap<String, Target>, service: &str, slice: &EndpointSlice, value: &Value) {
    for (number, endpoint) in slice.endpoints.iter().enumerate().filter(|(_, endpoint)| endpoint.is_ready()) {
        let addresses: BTreeSet<Ipv4Addr> =
            endpoint.addresses.iter().filter_map(|text| text.parse().ok()).collect();
        let pod = value["endpoints"][number]["targetRef"]["name"].as_str();
        let own = pod.map(|pod| format!("{pod}.{service}"));
        for name in own.into_iter().chain([service.to_owned()]) {
            if let Target::Addresses(all) = names.entry(name).or_insert(Target::Addresses(BTreeSet::new())) {
                all.extend(&addresses);
            }
        }
    }
}

/// `10-0-0-1.shop.pod.cluster.local`
fn of_pod(name: &str) -> Option<Target> {
    let (address, namespace) = name.strip_suffix(&format!(".pod.{DOMAIN}"))?.split_once('.')?;
    let address = address.replace('-', ".").parse().ok().filter(|_| !namespace.contains('.'))?;
    Some(Target::Addresses([address].into()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use simple_dns::Question;
    use tortie_api::manifest;
    use tortie_store::Written;

    use super::*;

    const SERVICES: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.1.1, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: shop}
spec: {clusterIP: None, ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: out, namespace: shop}
spec: {type: ExternalName, externalName: db.example.com}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: db-1, namespace: shop, labels: {kubernetes.io/service-name: db}}
addressType: IPv4
endpoints:
- {addresses: [10.0.0.1], targetRef: {kind: Pod, name: db-0}}
- {addresses: [10.0.0.2], targetRef: {kind: Pod, name: db-1}}
- {addresses: [10.0.0.3], targetRef: {kind: Pod, name: db-2}, conditions: {ready: false}}
ports: [{port: 80}]
"#;

    fn stored(text: &str) -> Vec<Stored> {
        let objects = manifest::read("m.yml", text).unwrap().into_iter();
        objects.map(|object| Stored::new(object.key, object.value, Written::at(1))).collect()
    }

    fn ask(zone: &Zone, name: &str, kind: TYPE, most: Option<usize>) -> (RCODE, Vec<String>, bool) {
        let mut query = Packet::new_query(7);
        query.questions.push(Question::new(
            Name::new_unchecked(name),
            QTYPE::TYPE(kind),
            CLASS::IN.into(),
            false,
        ));
        let bytes = zone.reply(&query.build_bytes_vec().unwrap(), most).unwrap();
        let reply = Packet::parse(&bytes).unwrap();
        assert_eq!((reply.id(), reply.questions.len()), (7, 1));
        let answers = reply.answers.iter().map(|record| match &record.rdata {
            RData::A(a) => Ipv4Addr::from(a.address).to_string(),
            RData::CNAME(name) => name.0.to_string(),
            other => panic!("{other:?}"),
        });
        (reply.rcode(), answers.collect(), reply.has_flags(PacketFlag::TRUNCATION))
    }

    #[test]
    fn names_of_services_and_pods() {
        let objects = stored(SERVICES);
        let zone = Zone::of(&objects.iter().collect::<Vec<_>>());
        for (name, kind, code, answers) in [
            ("web.shop.svc.cluster.local", TYPE::A, RCODE::NoError, &["10.96.1.1"][..]),
            ("WEB.Shop.svc.cluster.local", TYPE::A, RCODE::NoError, &["10.96.1.1"]),
            ("web.shop.svc.cluster.local", TYPE::AAAA, RCODE::NoError, &[]),
            ("shop.svc.cluster.local", TYPE::A, RCODE::NoError, &[]),
            ("db.shop.svc.cluster.local", TYPE::A, RCODE::NoError, &["10.0.0.1", "10.0.0.2"]),
            ("db-1.db.shop.svc.cluster.local", TYPE::A, RCODE::NoError, &["10.0.0.2"]),
            ("db-2.db.shop.svc.cluster.local", TYPE::A, RCODE::NameError, &[]),
            ("out.shop.svc.cluster.local", TYPE::A, RCODE::NoError, &["db.example.com"]),
            ("10-0-0-9.shop.pod.cluster.local", TYPE::A, RCODE::NoError, &["10.0.0.9"]),
            ("web.shop", TYPE::A, RCODE::Refused, &[]),
            ("web.other.svc.cluster.local", TYPE::A, RCODE::NameError, &[]),
            ("example.com", TYPE::A, RCODE::Refused, &[]),
            ("notcluster.local", TYPE::A, RCODE::Refused, &[]),
        ] {
            let answers: Vec<String> = answers.iter().map(|&text| text.to_owned()).collect();
            assert_eq!(ask(&zone, name, kind, None), (code, answers, false), "{name}");
        }
    }

    #[test]
    fn long_answers_need_tcp_and_noise_gets_none() {
        let many: BTreeSet<Ipv4Addr> = (0..200).map(|number| Ipv4Addr::new(10, 0, 1, number)).collect();
        let name = "many.shop.svc.cluster.local";
        let zone = Zone([(name.to_owned(), Target::Addresses(many))].into());
        assert_eq!(ask(&zone, name, TYPE::A, Some(MAX_UDP)), (RCODE::NoError, vec![], true));
        assert_eq!(ask(&zone, name, TYPE::A, None).1.len(), 200);
        assert_eq!(zone.reply(b"noise", None), None);
        let answer = Packet::new_reply(7).build_bytes_vec().unwrap();
        assert_eq!(zone.reply(&answer, None), None, "an answer to an answer would have no end");
    }

    #[test]
    fn the_first_service_brings_the_dns() {
        let node = "apiVersion: v1\nkind: Node\nmetadata: {name: one, labels: {kubernetes.io/os: linux}}\n";
        let windows = node.replace("linux", "windows");
        let missing = |text: &str| missing_writes(&stored(text).iter().collect::<Vec<_>>()).len();
        assert_eq!(missing(node), 0);
        assert_eq!(missing(&format!("{windows}---\n{SERVICES}")), 0, "no node can run it");
        assert_eq!(missing(&format!("{node}---\n{SERVICES}")), 4);
        let mut objects = stored(&format!("{node}---\n{SERVICES}"));
        for (key, value) in own_objects() {
            Resource::read(&key, &value).unwrap();
            objects.push(Stored::new(key, value, Written::at(1)));
        }
        assert_eq!(missing_writes(&objects.iter().collect::<Vec<_>>()).len(), 0);
    }
}
