//! The agent's metrics for Prometheus. `docs/metrics.md` explains each of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use tortie_cni::transport::Answer;
use tortie_cni::{Command, Failure};
use tortie_dataplane::{Dataplane, Delta, EndpointId, NodeState, Reason, Report, Severity, ShowError, Shown};

use crate::plane::InForce;

/// The metrics of one agent.
pub(crate) struct Metrics {
    registry: Registry,
    pods: Gauge,
    in_force: Gauge,
    connected: Gauge,
    conditions: Family<ConditionLabels, Gauge>,
    calls: Family<CallLabels, Counter>,
    call_seconds: Family<CommandLabels, Histogram>,
    passes: Family<PassLabels, Histogram>,
    deltas: Counter,
    memory: Gauge,
    files: Gauge,
    /// Since when the dataplane has been in one call.
    busy_since: Mutex<Option<Instant>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConditionLabels {
    reason: String,
    severity: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabels {
    command: &'static str,
    /// The code of CNI; 0 is success.
    code: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CommandLabels {
    command: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PassLabels {
    operation: &'static str,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let calls = Family::<CallLabels, Counter>::default();
        let call_seconds = Family::<CommandLabels, Histogram>::new_with_constructor(|| {
            Histogram::new(exponential_buckets(0.001, 2.0, 17))
        });
        let passes = Family::<PassLabels, Histogram>::new_with_constructor(|| {
            Histogram::new(exponential_buckets(0.000_5, 4.0, 10))
        });
        let conditions = Family::<ConditionLabels, Gauge>::default();
        let (pods, in_force, connected, memory, files) = <(Gauge, Gauge, Gauge, Gauge, Gauge)>::default();
        let deltas = Counter::<u64>::default();

        let mut registry = Registry::default();
        registry.register_with_unit(
            "process_resident_memory",
            "Resident memory",
            Unit::Bytes,
            memory.clone(),
        );
        registry.register("process_open_fds", "Open file descriptors", files.clone());
        let own = registry.sub_registry_with_prefix("tortie");
        own.register(
            "build",
            "The version of the agent",
            Info::new([("version", env!("CARGO_PKG_VERSION"))]),
        );
        own.register("pods", "Pods of the node that the dataplane knows", pods.clone());
        let help = "1 if everything that the agent has read is in force on the node, otherwise 0";
        own.register("in_force", help, in_force.clone());
        let help = "1 if the agent has read the cluster and knows nothing that keeps pods of the node and those of others from each other, otherwise 0";
        own.register("connected", help, connected.clone());
        let help = "Conditions of the node and its pods, as in its NodeReport";
        own.register("conditions", help, conditions.clone());
        own.register("cni_calls", "Finished calls of the CNI plugin", calls.clone());
        let help = "Duration of calls of the CNI plugin";
        own.register_with_unit("cni_call_duration", help, Unit::Seconds, call_seconds.clone());
        let help =
            "Duration of the dataplane's passes: apply for changes, resync for comparisons with the system";
        own.register_with_unit("dataplane_pass_duration", help, Unit::Seconds, passes.clone());
        own.register("dataplane_deltas", "Changes that the dataplane has applied", deltas.clone());
        let busy_since = Mutex::default();
        Self {
            registry,
            pods,
            in_force,
            connected,
            conditions,
            calls,
            call_seconds,
            passes,
            deltas,
            memory,
            files,
            busy_since,
        }
    }

    /// Counts a finished call.
    pub(crate) fn call(&self, command: Command, answer: &Answer, duration: Duration) {
        let command = command.name();
        let code = answer.as_ref().err().map_or(0, |Failure { code, .. }| code.0);
        self.calls.get_or_create(&CallLabels { command, code }).inc();
        self.call_seconds.get_or_create(&CommandLabels { command }).observe(duration.as_secs_f64());
    }

    /// How long the dataplane has been in its current call.
    pub(crate) fn busy(&self, now: Instant) -> Option<Duration> {
        let since = *self.busy_since.lock().unwrap_or_else(PoisonError::into_inner);
        Some(now.saturating_duration_since(since?))
    }

    /// The text for Prometheus. `reasons` are those of all conditions of the agent.
    pub(crate) fn text(&self, now: &InForce, reasons: Vec<String>) -> String {
        let number = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        self.pods.set(number(now.endpoints.len()));
        let is_in_force =
            !now.positions.is_empty() && now.report.conditions().all(|one| !one.reason.is_failure());
        self.in_force.set(i64::from(is_in_force));
        let is_cut_off = reasons.iter().any(|reason| Reason::named_disconnects(reason));
        // Nothing is known before the agent has read the cluster.
        self.connected.set(i64::from(!now.given.is_empty() && !is_cut_off));
        let mut counts: BTreeMap<String, i64> = BTreeMap::new();
        for reason in reasons {
            *counts.entry(reason).or_default() += 1;
        }
        self.conditions.clear();
        for (reason, count) in counts {
            let severity = Severity::of(&reason).label();
            self.conditions.get_or_create(&ConditionLabels { reason, severity }).set(count);
        }
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        self.memory.set(resident_bytes(&status));
        self.files.set(std::fs::read_dir("/proc/self/fd").map_or(0, |files| number(files.count())));
        let mut text = String::new();
        // A String takes everything.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// The resident memory in `/proc/PID/status`, which has it in kB.
fn resident_bytes(status: &str) -> i64 {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<i64>().ok());
    kilobytes.unwrap_or_default().saturating_mul(1024)
}

/// A dataplane whose work is measured.
pub(crate) struct Measured {
    pub(crate) inner: Box<dyn Dataplane>,
    pub(crate) metrics: Arc<Metrics>,
}

impl Measured {
    fn pass(&mut self, operation: &'static str, work: impl FnOnce(&mut dyn Dataplane) -> Report) -> Report {
        let started = Instant::now();
        let busy = |since| *self.metrics.busy_since.lock().unwrap_or_else(PoisonError::into_inner) = since;
        busy(Some(started));
        let report = work(&mut *self.inner);
        busy(None);
        let seconds = started.elapsed().as_secs_f64();
        self.metrics.passes.get_or_create(&PassLabels { operation }).observe(seconds);
        report
    }
}

impl Dataplane for Measured {
    fn apply(&mut self, state: &NodeState, deltas: &[Delta]) -> Report {
        self.metrics.deltas.inc_by(u64::try_from(deltas.len()).unwrap_or(u64::MAX));
        self.pass("apply", |inner| inner.apply(state, deltas))
    }

    fn resync(&mut self, state: &NodeState) -> Report {
        self.pass("resync", |inner| inner.resync(state))
    }

    fn look(&mut self, state: &NodeState) -> Option<Report> {
        self.inner.look(state)
    }

    fn watch(&mut self, told: Box<dyn Fn() + Send>) {
        self.inner.watch(told);
    }

    fn asks_for_services(&self) -> bool {
        self.inner.asks_for_services()
    }

    fn show(&mut self, state: &NodeState, endpoint: &EndpointId) -> Result<Shown, ShowError> {
        self.inner.show(state, endpoint)
    }
}

#[cfg(test)]
mod tests {
    use tortie_api::{Kind, Position, Positions};
    use tortie_cni::Code;

    use super::*;

    #[test]
    fn every_metric_is_documented_and_has_the_value_of_now() {
        let metrics = Metrics::new();
        metrics.call(Command::Add, &Ok(None), Duration::from_millis(3));
        metrics.call(Command::Add, &Err(Failure::new(Code::IPAM, "", "")), Duration::from_millis(3));
        let mut measured = Measured { inner: Box::new(Idle), metrics: Arc::new(metrics) };
        measured.resync(&NodeState::default());
        let Measured { metrics, .. } = measured;
        let text = metrics.text(&InForce::default(), vec!["KernelModuleMissing".to_owned()]);
        for line in [
            "tortie_in_force 0",
            "tortie_connected 0",
            "tortie_pods 0",
            "tortie_conditions{reason=\"KernelModuleMissing\",severity=\"information\"} 1",
            "tortie_cni_calls_total{command=\"ADD\",code=\"0\"} 1",
            "tortie_cni_calls_total{command=\"ADD\",code=\"101\"} 1",
            "tortie_cni_call_duration_seconds_count{command=\"ADD\"} 2",
            "tortie_dataplane_pass_duration_seconds_count{operation=\"resync\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(
            !metrics.text(&InForce::default(), Vec::new()).contains("KernelModuleMissing"),
            "a resolved condition stays"
        );
        let documented = include_str!("../../../docs/metrics.md");
        for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
            let (name, kind) = line.split_once(' ').unwrap();
            let ending = match kind {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            assert!(
                documented.contains(&format!("| `{name}{ending}` | {kind} |")),
                "docs/metrics.md lacks {line}"
            );
        }
    }

    /// Other nodes may be out of reach while everything is in force, and the other way round.
    #[test]
    fn a_node_is_connected_while_nothing_is_out_of_reach() {
        let given: Positions = [(Kind::Pod, Position(1))].into_iter().collect();
        let known = || InForce { given: given.clone(), positions: given.clone(), ..InForce::default() };
        for (reason, is_connected, severity) in [
            (None, true, ""),
            (Some("CalicoLeftover"), true, "information"),
            (Some("PolicyNotInForce"), true, "failure"),
            (Some("FieldNotSupported"), true, "without_effect"),
            (Some("BlockUnreachable"), false, "unreachable"),
            (Some("ForeignVxlanLink"), false, "unreachable"),
            (Some("BlockUnreachable"), false, "unreachable"),
        ] {
            let text = Metrics::new().text(&known(), reason.map(str::to_owned).into_iter().collect());
            let has = |line: &str| text.lines().any(|found| found == line);
            assert!(has(&format!("tortie_connected {}", u8::from(is_connected))), "{reason:?}: {text}");
            assert!(has("tortie_in_force 1"), "{text}");
            if let Some(reason) = reason {
                let line = format!("tortie_conditions{{reason=\"{reason}\",severity=\"{severity}\"}} 1");
                assert!(has(&line), "{line} is not in\n{text}");
            }
        }
    }

    #[test]
    fn resident_memory_is_read() {
        assert_eq!(resident_bytes("VmSize:\t 9 kB\nVmRSS:\t    1024 kB\n"), 1 << 20);
        assert!(resident_bytes(&std::fs::read_to_string("/proc/self/status").unwrap()) > 1 << 20);
        assert_eq!(resident_bytes("meow"), 0);
    }

    struct Idle;

    impl Dataplane for Idle {
        fn apply(&mut self, _: &NodeState, _: &[Delta]) -> Report {
            Report::default()
        }

        fn resync(&mut self, _: &NodeState) -> Report {
            Report::default()
        }

        fn show(&mut self, _: &NodeState, endpoint: &EndpointId) -> Result<Shown, ShowError> {
            Err(ShowError::NoEndpoint(endpoint.to_string()))
        }
    }
}
