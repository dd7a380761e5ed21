//! The limits of a pod's bandwidth: of the container runtime (`runtimeConfig.bandwidth`), otherwise of the Pod's annotations.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use serde::Deserialize;
use serde_json::Value;
use tortie_api::kubernetes::Pod;
use tortie_cni::{Code, Failure, Invocation, NetworkConfig};
use tortie_dataplane::{BandwidthLimit, BandwidthLimits};
use tortie_store::Stored;

use crate::pods::Pods;
use crate::runtime_config::with_lowercase_names;

/// The annotations.
const ANNOTATIONS: [&str; 2] = [INGRESS, EGRESS];
const INGRESS: &str = "kubernetes.io/ingress-bandwidth";
const EGRESS: &str = "kubernetes.io/egress-bandwidth";

/// The rates in bits a second that kubelets accept (`pkg/util/bandwidth` of Kubernetes).
const POSSIBLE: RangeInclusive<u64> = 1_000..=1_000_000_000_000_000;

impl Pods {
    /// The limits of the runtime's request.
    ///
    /// # Errors
    /// It cannot be read, or no link has such a rate.
    pub(crate) fn passed_limits(config: &NetworkConfig) -> Result<BandwidthLimits, Failure> {
        let passed = config.extra.get("runtimeConfig").and_then(|asked| asked.get("bandwidth"));
        let Some(passed) = passed.filter(|passed| !passed.is_null()) else {
            return Ok(BandwidthLimits::default());
        };
        let Passed { ingress_rate, ingress_burst, egress_rate, egress_burst } = read(passed)?;
        Ok(BandwidthLimits {
            ingress: limit("runtimeConfig.bandwidth.ingress", ingress_rate, ingress_burst)?,
            egress: limit("runtimeConfig.bandwidth.egress", egress_rate, egress_burst)?,
        })
    }

    /// The limits of the pod's bandwidth. A plugin `bandwidth` after Tortie's gets those of the annotations from the runtime, and
    /// sets them itself.
    pub(crate) fn limits(&self, call: &Invocation, pod: &(Stored, Pod)) -> Result<BandwidthLimits, Failure> {
        let BandwidthLimits { ingress, egress } = Self::passed_limits(&call.config)?;
        let annotated = match self.has_bandwidth_plugin {
            true => BandwidthLimits::default(),
            false => annotated(&pod.1.metadata.annotations)?,
        };
        let limits =
            BandwidthLimits { ingress: ingress.or(annotated.ingress), egress: egress.or(annotated.egress) };
        if limits == BandwidthLimits::default() || self.wiring.limits_bandwidth() {
            return Ok(limits);
        }
        let msg = format!("{} has a limit of bandwidth, which this node cannot set", pod.0.key);
        let remedy = format!("take the annotations {} out, or use a Linux node", ANNOTATIONS.join(" and "));
        Err(Failure::new(Code::NOT_SUPPORTED, msg, remedy))
    }
}

/// What the runtime passes (CNI's conventions for plugins): rates in bits a second, bursts in bits.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Passed {
    #[serde(rename = "ingressrate")]
    ingress_rate: u64,
    #[serde(rename = "ingressburst")]
    ingress_burst: u64,
    #[serde(rename = "egressrate")]
    egress_rate: u64,
    #[serde(rename = "egressburst")]
    egress_burst: u64,
}

fn read(passed: &Value) -> Result<Passed, Failure> {
    let read = match passed {
        Value::Object(_) => {
            Passed::deserialize(with_lowercase_names(passed)).map_err(|error| error.to_string())
        }
        other => Err(format!("it is {other}")),
    };
    read.map_err(|why| {
        let msg = "runtimeConfig.bandwidth has other members than numbers ingressRate, ingressBurst, egressRate and egressBurst";
        Failure::new(Code::INVALID_CONFIG, msg, why)
    })
}

fn limit(name: &str, rate: u64, burst: u64) -> Result<Option<BandwidthLimit>, Failure> {
    const UNLIMITED: u64 = u32::MAX as u64;
    let invalid = |msg: String| Err(Failure::new(Code::INVALID_CONFIG, msg, ""));
    match (rate, burst) {
        (0, 0) => Ok(None),
        (0, _) => invalid(format!("{name}Burst is {burst}, and there is no {name}Rate")),
        _ if !POSSIBLE.contains(&rate) => invalid(format!("{name}Rate is {rate}; {}", possible())),
        // containerd passes the largest number of 32 bits if nobody has said anything about bursts.
        (_, 0 | UNLIMITED..) => Ok(Some(BandwidthLimit { bytes_per_second: rate / 8, burst: None })),
        _ => Ok(Some(BandwidthLimit { bytes_per_second: rate / 8, burst: u32::try_from(burst / 8).ok() })),
    }
}

fn possible() -> String {
    format!("rates are {} to {} bits a second", POSSIBLE.start(), POSSIBLE.end())
}

/// The limits of a Pod's annotations.
///
/// # Errors
/// An annotation is no quantity, or no link has such a rate.
fn annotated(annotations: &BTreeMap<String, String>) -> Result<BandwidthLimits, Failure> {
    let one = |name: &str| {
        let Some(text) = annotations.get(name) else { return Ok(None) };
        let rate = quantity(text).filter(|rate| POSSIBLE.contains(rate)).ok_or_else(|| {
            let msg =
                format!("the annotation {name} is {text:?}, which is no rate such as 10M; {}", possible());
            Failure::new(Code::NOT_SUPPORTED, msg, "write the rate in bits a second")
        })?;
        Ok(Some(BandwidthLimit { bytes_per_second: rate / 8, burst: None }))
    };
    Ok(BandwidthLimits { ingress: one(INGRESS)?, egress: one(EGRESS)? })
}

/// A quantity of Kubernetes (`apimachinery/pkg/api/resource`), rounded up to a whole number.
fn quantity(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let number: f64 = number.parse().ok().filter(|number: &f64| number.is_finite())?;
    let factor = match suffix {
        "" => 1.0,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1_048_576.0,
        "Gi" => 1_073_741_824.0,
        "Ti" => 1_099_511_627_776.0,
        "Pi" => 1_125_899_906_842_624.0,
        exponent => {
            let power: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
            10f64.powi(power)
        }
    };
    let value = (number * factor).ceil();
    // Larger ones are out of range in any case.
    (0.0..=1e18).contains(&value).then_some(value as u64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(bits: u64, burst: Option<u32>) -> Option<BandwidthLimit> {
        Some(BandwidthLimit { bytes_per_second: bits / 8, burst })
    }

    #[test]
    fn annotations_are_quantities_of_bits_a_second() {
        for (text, bits) in [
            ("1k", Some(1_000)),
            ("10M", Some(10_000_000)),
            ("1.5G", Some(1_500_000_000)),
            ("1Ki", Some(1024)),
            ("2e6", Some(2_000_000)),
            ("1E3", Some(1_000)),
            ("8000", Some(8_000)),
            ("8000000m", Some(8_000)),
            ("1P", Some(1_000_000_000_000_000)),
            ("2P", None),
            ("999", None),
            ("0", None),
            ("-1M", None),
            ("10MB", None),
            ("fast", None),
            ("", None),
            (".", None),
            ("inf", None),
            ("1e999", None),
        ] {
            for (name, is_ingress) in [(INGRESS, true), (EGRESS, false)] {
                let read = annotated(&[(name.to_owned(), text.to_owned())].into());
                let Some(bits) = bits else {
                    let failure = read.unwrap_err().to_string();
                    assert!(failure.contains(name) && failure.contains("no rate such as 10M"), "{failure}");
                    continue;
                };
                let (found, other) = match (read.unwrap(), is_ingress) {
                    (limits, true) => (limits.ingress, limits.egress),
                    (limits, false) => (limits.egress, limits.ingress),
                };
                assert_eq!((found, other), (of(bits, None), None), "{text}");
            }
        }
    }

    #[test]
    fn the_runtime_passes_bits() {
        let read = |asked: Value| {
            let config = json!({"cniVersion": "1.0.0", "name": "n", "runtimeConfig": {"bandwidth": asked}});
            Pods::passed_limits(&serde_json::from_value(config).unwrap())
                .map_err(|failure| failure.to_string())
        };
        let none = BandwidthLimits::default();
        for (asked, expected) in [
            (json!(null), none),
            (json!({}), none),
            (json!({"ingressRate": 0, "ingressBurst": 0}), none),
            (
                json!({"ingressRate": 8_000, "ingressBurst": 80_000}),
                BandwidthLimits { ingress: of(8_000, Some(10_000)), ..none },
            ),
            (json!({"egressRate": 8_000}), BandwidthLimits { egress: of(8_000, None), ..none }),
            // As containerd passes it.
            (
                json!({"IngressRate": 8_000, "IngressBurst": u32::MAX, "EgressRate": 0, "EgressBurst": 0}),
                BandwidthLimits { ingress: of(8_000, None), ..none },
            ),
            (
                json!({"egressRate": 8_000, "egressBurst": u64::MAX}),
                BandwidthLimits { egress: of(8_000, None), ..none },
            ),
        ] {
            assert_eq!(read(asked.clone()), Ok(expected), "{asked}");
        }
        for (asked, named) in [
            (json!({"ingressBurst": 1}), "there is no runtimeConfig.bandwidth.ingressRate"),
            (json!({"egressRate": 7}), "egressRate is 7"),
            (json!({"ingressRate": -1}), "other members than numbers"),
            (json!({"rate": 1}), "other members than numbers"),
            (json!([1]), "other members than numbers"),
        ] {
            let problem = read(asked.clone()).unwrap_err();
            assert!(problem.contains(named), "{asked}: {problem}");
        }
    }
}
