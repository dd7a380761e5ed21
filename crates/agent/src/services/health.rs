//! Health checks of load balancers: a port of the node for each Service with `externalTrafficPolicy: Local`, and `/healthz` and `/livez` of the
//! proxy itself. Bodies and headers are those of kube-proxy (`pkg/proxy/healthcheck`), because balancers of clouds read them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tortie_api::net::IpVersion;
use tortie_services::{HealthCheck, NodePortPlace, NodeServices, ServiceName};

use crate::health::Taken;
use crate::http_server::{AskedPath, OtherFamily, answer_all, bind};

/// The port of `/healthz`, which balancers of clouds probe on each node.
const PROXY_PORT: u16 = 10_256;
/// How long changes may wait until the proxy counts as unhealthy: twice the period in which kube-proxy compares everything.
const MAX_DELAY: Duration = Duration::from_secs(60);
/// The taint of a node that goes.
const TAINT: &str = "ToBeDeletedByClusterAutoscaler";

/// The health of the node's Services.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct ServiceHealth {
    /// The health checks of Services, by the address that they have.
    checks: BTreeMap<SocketAddr, (ServiceName, HealthCheck)>,
    /// Where node ports are.
    places: BTreeMap<IpVersion, NodePortPlace>,
    /// Since when changes wait.
    waits_since: Option<Instant>,
    /// When the last changes were put in force; absent before the first ones.
    updated: Option<Timestamp>,
    /// True if the node is to get connections: it does not go.
    is_eligible: bool,
}

impl ServiceHealth {
    /// The health of these Services.
    pub(super) fn new(services: &NodeServices, is_eligible: bool) -> Self {
        let mut health = Self { is_eligible, places: services.node_ports.clone(), ..Self::default() };
        for ((service, family), check) in &services.health_checks {
            let Some(address) = services.node_ports.get(family).and_then(|place| listen_at(place, *family))
            else {
                continue;
            };
            health.checks.insert(SocketAddr::new(address, check.port), (service.clone(), *check));
        }
        health
    }

    /// Notes whether changes wait.
    pub(super) fn with_progress(self, waits_since: Option<Instant>, updated: Option<Timestamp>) -> Self {
        Self { waits_since, updated, ..self }
    }

    fn is_healthy(&self, now: Instant) -> bool {
        let delay = self.waits_since.map(|since| now.saturating_duration_since(since));
        self.updated.is_some() && delay.is_none_or(|delay| delay < MAX_DELAY)
    }

    /// The answer about a Service.
    fn of_service(&self, at: SocketAddr, asked: &AskedPath<'_>, now: Instant) -> Option<Response<String>> {
        let (service, check) = self.checks.get(&at)?;
        if !self.accepts(asked.local.ip().to_canonical()) {
            return None;
        }
        let is_healthy = self.is_healthy(now);
        let count = check.local_endpoints;
        let body = json!({
            "service": {"namespace": service.namespace, "name": service.name},
            "localEndpoints": count,
            "serviceProxyHealthy": is_healthy,
        });
        let mut response = answer(is_healthy && count > 0, &body);
        let weight = HeaderValue::from(count);
        response.headers_mut().insert(HeaderName::from_static("x-load-balancing-endpoint-weight"), weight);
        Some(response)
    }

    fn accepts(&self, address: IpAddr) -> bool {
        match self.places.get(&IpVersion::of(&address)) {
            Some(NodePortPlace::Primary(primary)) => *primary == Some(address),
            Some(NodePortPlace::AllLocal) => true,
            Some(NodePortPlace::LocalIn(networks)) => {
                networks.iter().any(|network| network.contains(&address))
            }
            None => false,
        }
    }

    /// The answer about the proxy itself.
    fn of_proxy(&self, path: &str, now: Instant) -> Response<String> {
        let (is_healthy, is_eligible) = (self.is_healthy(now), self.is_eligible);
        let current = Timestamp::now();
        let updated = if is_healthy { current } else { self.updated.unwrap_or(Timestamp::UNIX_EPOCH) };
        let mut body = json!({"lastUpdated": updated.to_string(), "currentTime": current.to_string()});
        match path {
            "/healthz" => {
                body["nodeEligible"] = json!(is_eligible);
                answer(is_healthy && is_eligible, &body)
            }
            "/livez" => answer(is_healthy, &body),
            _ => {
                let mut response = Response::new("there are /healthz and /livez\n".to_owned());
                *response.status_mut() = StatusCode::NOT_FOUND;
                response
            }
        }
    }
}

/// The address at which health checks of a family are.
fn listen_at(place: &NodePortPlace, family: IpVersion) -> Option<IpAddr> {
    match (place, family) {
        (NodePortPlace::Primary(address), _) => *address,
        (_, IpVersion::V4) => Some(Ipv4Addr::UNSPECIFIED.into()),
        (_, IpVersion::V6) => Some(Ipv6Addr::UNSPECIFIED.into()),
    }
}

fn answer(is_well: bool, body: &Value) -> Response<String> {
    let status = if is_well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let response = Response::builder()
        .status(status)
        .header(CONTENT_TYPE, "application/json")
        .header("X-Content-Type-Options", "nosniff");
    response.body(format!("{body}\n")).unwrap_or_default()
}

/// True if the node is to get connections from balancers: it is not deleted, and the autoscaler does not remove it.
pub(super) fn is_eligible(node: Option<&Value>) -> bool {
    let taints = |node: &Value| {
        let taints = node["spec"]["taints"].as_array().cloned().unwrap_or_default();
        taints.iter().any(|taint| taint["key"] == TAINT)
    };
    node.is_some_and(|node| node["metadata"]["deletionTimestamp"].is_null() && !taints(node))
}

/// Serves the health checks until the other end of the channel has gone.
pub(crate) async fn serve(mut health: watch::Receiver<ServiceHealth>, taken: Arc<watch::Sender<Taken>>) {
    // kube-proxy has the port until then.
    if health.wait_for(|health| health.updated.is_some()).await.is_err() {
        return;
    }
    let mut servers = JoinSet::new();
    servers.spawn(serve_proxy(health.clone(), taken.clone()));
    let mut running: BTreeMap<SocketAddr, AbortHandle> = BTreeMap::new();
    loop {
        let wanted: Vec<SocketAddr> = health.borrow_and_update().checks.keys().copied().collect();
        running.retain(|address, server| {
            let stays = wanted.contains(address);
            if !stays {
                server.abort();
                taken.send_if_modified(|taken| taken.remove(address).is_some());
            }
            stays
        });
        for address in wanted {
            running
                .entry(address)
                .or_insert_with(|| servers.spawn(serve_service(address, health.clone(), taken.clone())));
        }
        while servers.try_join_next().is_some() {}
        if health.changed().await.is_err() {
            return;
        }
    }
}

async fn serve_service(
    address: SocketAddr,
    health: watch::Receiver<ServiceHealth>,
    taken: Arc<watch::Sender<Taken>>,
) {
    // The other family has its own counts.
    let listener = bind(address, OtherFamily::Refused, &taken).await;
    answer_all(listener, move |asked| health.borrow().of_service(address, &asked, Instant::now())).await;
}

async fn serve_proxy(health: watch::Receiver<ServiceHealth>, taken: Arc<watch::Sender<Taken>>) {
    // Both families, unless the node has no IPv6.
    let has_ipv6 = tokio::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).await.is_ok();
    let all: IpAddr = if has_ipv6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let listener = bind(SocketAddr::new(all, PROXY_PORT), OtherFamily::Taken, &taken).await;
    answer_all(listener, move |asked| Some(health.borrow().of_proxy(asked.path, Instant::now()))).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn services(place: NodePortPlace, local_endpoints: usize) -> NodeServices {
        let service = ServiceName { namespace: "ns".to_owned(), name: "web".to_owned() };
        let mut services = NodeServices::default();
        services.node_ports.insert(IpVersion::V4, place);
        let check = HealthCheck { port: 0, local_endpoints };
        services.health_checks.insert((service, IpVersion::V4), check);
        services
    }

    #[test]
    fn a_service_is_healthy_with_local_endpoints_while_the_proxy_keeps_up() {
        let (now, place) = (Instant::now(), NodePortPlace::Primary("192.0.2.1".parse().ok()));
        let at: SocketAddr = "192.0.2.1:0".parse().unwrap();
        let long_ago = now.checked_sub(MAX_DELAY).unwrap();
        for (endpoints, waits_since, updated, status) in [
            (2, None, true, 200),
            (0, None, true, 503),
            (2, Some(now), true, 200),
            (2, Some(long_ago), true, 503),
            (2, None, false, 503),
        ] {
            let health = ServiceHealth::new(&services(place.clone(), endpoints), true);
            let health = health.with_progress(waits_since, updated.then(Timestamp::now));
            let answer = health.of_service(at, &AskedPath { local: at, path: "/any" }, now).unwrap();
            assert_eq!(answer.status().as_u16(), status, "{endpoints} {waits_since:?} {updated}");
            let headers = answer.headers();
            assert_eq!(headers["content-type"], "application/json");
            assert_eq!(headers["x-content-type-options"], "nosniff");
            assert_eq!(headers["x-load-balancing-endpoint-weight"], endpoints.to_string().as_str());
            let is_healthy = updated && waits_since != Some(long_ago);
            let body: Value = serde_json::from_str(answer.body()).unwrap();
            let expected = json!({
                "service": {"namespace": "ns", "name": "web"}, "localEndpoints": endpoints,
                "serviceProxyHealthy": is_healthy,
            });
            assert_eq!(body, expected);
        }
    }

    #[test]
    fn a_node_that_goes_gets_no_connections_and_lives() {
        for (node, healthz) in [
            (json!({"metadata": {}}), 200),
            (json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), 503),
            (json!({"spec": {"taints": [{"key": "other"}, {"key": TAINT, "effect": "NoSchedule"}]}}), 503),
            (json!({"spec": {"taints": [{"key": "other"}]}}), 200),
        ] {
            let health = ServiceHealth::new(&NodeServices::default(), is_eligible(Some(&node)));
            let health = health.with_progress(None, Some(Timestamp::now()));
            let status = |path| health.of_proxy(path, Instant::now()).status().as_u16();
            assert_eq!((status("/healthz"), status("/livez"), status("/")), (healthz, 200, 404), "{node}");
        }
        assert!(!is_eligible(None), "the Node is gone");
    }

    #[test]
    fn only_addresses_that_accept_node_ports_answer() {
        let networks = NodePortPlace::LocalIn(vec!["192.0.2.0/29".parse().unwrap()]);
        for (place, at, local, answers) in [
            (NodePortPlace::AllLocal, "0.0.0.0:0", "198.51.100.1:0", true),
            (networks.clone(), "0.0.0.0:0", "192.0.2.1:0", true),
            (networks, "0.0.0.0:0", "192.0.2.9:0", false),
        ] {
            let health = ServiceHealth::new(&services(place, 1), true);
            let asked = AskedPath { local: local.parse().unwrap(), path: "/" };
            let answer = health.of_service(at.parse().unwrap(), &asked, Instant::now());
            assert_eq!(answer.is_some(), answers, "{local}");
        }
        let without_address = ServiceHealth::new(&services(NodePortPlace::Primary(None), 1), true);
        assert!(without_address.checks.is_empty());
    }

    /// Each family has its own count at one port.
    #[tokio::test]
    async fn both_families_of_a_service_have_a_server() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut services = services(NodePortPlace::AllLocal, 1);
        services.node_ports.insert(IpVersion::V6, NodePortPlace::AllLocal);
        let (service, _) = services.health_checks.first_key_value().unwrap().0.clone();
        for (family, local_endpoints) in [(IpVersion::V4, 1), (IpVersion::V6, 0)] {
            let check = HealthCheck { port, local_endpoints };
            services.health_checks.insert((service.clone(), family), check);
        }
        let health = ServiceHealth::new(&services, true).with_progress(None, Some(Timestamp::now()));
        let (_sender, receiver) = watch::channel(health);
        let serving = tokio::spawn(serve(receiver, Arc::default()));
        for (address, status) in
            [(IpAddr::from(Ipv4Addr::LOCALHOST), "200"), (Ipv6Addr::LOCALHOST.into(), "503")]
        {
            let answer = loop {
                use tokio::io::{AsyncReadExt, AsyncWriteExt};
                let Ok(mut stream) = tokio::net::TcpStream::connect((address, port)).await else {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    continue;
                };
                stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
                let mut answer = String::new();
                stream.read_to_string(&mut answer).await.unwrap();
                break answer;
            };
            assert_eq!(answer.split_whitespace().nth(1), Some(status), "{address}: {answer}");
        }
        serving.abort();
    }

    /// Servers come and go with Services, and an address that is taken is told.
    #[tokio::test]
    async fn servers_follow_the_services() {
        let own = |port| {
            let mut services = services(NodePortPlace::AllLocal, 1);
            services.health_checks.values_mut().for_each(|check| check.port = port);
            ServiceHealth::new(&services, true).with_progress(None, Some(Timestamp::now()))
        };
        let free = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
        let port = free.local_addr().unwrap().port();
        let (sender, receiver) = watch::channel(own(port));
        let taken: Arc<watch::Sender<Taken>> = Arc::default();
        let mut told = taken.subscribe();
        let serving = tokio::spawn(serve(receiver, taken.clone()));
        let at: SocketAddr = (Ipv4Addr::UNSPECIFIED, port).into();
        told.wait_for(|taken| taken.contains_key(&at)).await.unwrap();
        drop(free);
        told.wait_for(|taken| !taken.contains_key(&at)).await.unwrap();
        let connect = || tokio::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port));
        connect().await.unwrap();
        sender.send_replace(ServiceHealth::default().with_progress(None, Some(Timestamp::now())));
        while connect().await.is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        drop(sender);
        serving.await.unwrap();
    }
}
