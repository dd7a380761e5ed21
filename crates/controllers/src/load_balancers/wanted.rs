//! The addresses that a Service of type LoadBalancer should have, and how it gets there from those that it has. Pure.
//!
//! Annotations and classes are Calico's (`kube-controllers/pkg/controllers/loadbalancer/loadbalancer_controller.go`).

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::Value;
use tortie_api::calico::{AssignIps, IpPool};
use tortie_ipam::{Assignment, Family};

const POOLS_V4: &str = "projectcalico.org/ipv4pools";
const POOLS_V6: &str = "projectcalico.org/ipv6pools";
const ADDRESSES: &str = "projectcalico.org/loadBalancerIPs";
/// The class of Services that ask for Calico's addresses.
const CLASS: &str = "calico";

/// A Service, as far as its addresses are concerned.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Service {
    metadata: ServiceMetadata,
    spec: ServiceFields,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ServiceMetadata {
    uid: String,
    annotations: Option<BTreeMap<String, String>>,
    deletion_timestamp: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ServiceFields {
    #[serde(rename = "type")]
    service_type: Option<String>,
    load_balancer_class: Option<String>,
    #[serde(rename = "loadBalancerIP")]
    load_balancer_ip: Option<String>,
    ip_families: Option<Vec<String>>,
}

/// The addresses that a Service should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// None of Tortie's.
    Nothing,
    /// These, at most one of each family.
    These(Vec<IpAddr>),
    /// One of each family, from the pools with these names or networks; from any pool if the list is empty.
    OneOf(Vec<(Family, Vec<String>)>),
}

/// The steps from the addresses that a Service has to those that it should have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) release: Vec<Assignment>,
    pub(crate) assign: Vec<Missing>,
}

/// An address that a Service lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Missing {
    This(IpAddr),
    /// Any of these pools.
    Any(Family, Vec<String>),
}

impl Service {
    /// The Service in an object.
    ///
    /// # Errors
    /// A field is of an unexpected type.
    pub(crate) fn of(value: &Value) -> Result<Self, String> {
        Self::deserialize(value).map_err(|error| error.to_string())
    }

    pub(crate) fn uid(&self) -> &str {
        &self.metadata.uid
    }

    fn annotation(&self, name: &str) -> Option<&str> {
        let annotations = self.metadata.annotations.as_ref()?;
        annotations.get(name).map(String::as_str).filter(|text| !text.is_empty())
    }

    /// Whether it is of the type with such addresses.
    pub(crate) fn is_load_balancer(&self) -> bool {
        self.spec.service_type.as_deref() == Some("LoadBalancer")
    }

    /// Whether it is being deleted: it keeps its addresses until it is gone, and gets no others.
    pub(crate) fn is_ending(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }

    /// Whether it gets addresses.
    fn is_managed(&self, assign_ips: AssignIps) -> bool {
        if !self.is_load_balancer() {
            return false;
        }
        match self.spec.load_balancer_class.as_deref() {
            Some(class) => class == CLASS,
            None => match assign_ips {
                AssignIps::AllServices => true,
                AssignIps::RequestedServicesOnly => {
                    [POOLS_V4, POOLS_V6, ADDRESSES].iter().any(|name| self.annotation(name).is_some())
                }
            },
        }
    }

    /// The addresses that it should have.
    ///
    /// # Errors
    /// What is wrong with an annotation; the addresses stay as they are.
    pub(crate) fn wanted(&self, assign_ips: AssignIps, known: &[(String, IpPool)]) -> Result<Wanted, String> {
        if !self.is_managed(assign_ips) {
            return Ok(Wanted::Nothing);
        }
        if let Some(text) = self.annotation(ADDRESSES) {
            return addresses(text).map(Wanted::These);
        }
        let pools = |annotation: &str| {
            let Some(text) = self.annotation(annotation) else { return Ok(Vec::new()) };
            let list = strings(annotation, text)?;
            let is_known =
                |pool: &String| pool.parse::<IpNet>().is_ok() || known.iter().any(|(name, _)| name == pool);
            match list.iter().find(|pool| !is_known(pool)) {
                None => Ok(list),
                Some(pool) => Err(format!(
                    "annotation {annotation}: {pool} is neither a network nor an IPPool for load balancers"
                )),
            }
        };
        let (four, six) = (pools(POOLS_V4)?, pools(POOLS_V6)?);
        let families = self.spec.ip_families.clone().unwrap_or_else(|| vec!["IPv4".to_owned()]);
        let each = families.iter().map(|family| match family.as_str() {
            "IPv6" => (Family::V6, six.clone()),
            _ => (Family::V4, four.clone()),
        });
        Ok(Wanted::OneOf(each.collect()))
    }

    /// The problem of `spec.loadBalancerIP`, which Kubernetes has deprecated and Calico does not read.
    pub(crate) fn unused_address(&self, has: &[Assignment]) -> Option<String> {
        let text = self.spec.load_balancer_ip.as_deref().filter(|text| !text.is_empty())?;
        let is_given = text.parse().is_ok_and(|wanted: IpAddr| has.iter().any(|one| one.address == wanted));
        (!is_given && self.annotation(ADDRESSES).is_none()).then(|| {
            format!("spec.loadBalancerIP is not used; ask for {text} by the annotation {ADDRESSES}: '[\"{text}\"]'")
        })
    }
}

fn strings(annotation: &str, text: &str) -> Result<Vec<String>, String> {
    let list: Vec<String> = serde_json::from_str(text).map_err(|_| {
        format!("annotation {annotation}: {text:?} is no list; write for example '[\"name\"]'")
    })?;
    match list.is_empty() {
        true => Err(format!("annotation {annotation}: the list is empty; remove the annotation")),
        false => Ok(list),
    }
}

fn addresses(text: &str) -> Result<Vec<IpAddr>, String> {
    let mut found: Vec<IpAddr> = Vec::new();
    for each in strings(ADDRESSES, text)? {
        let address: IpAddr =
            each.parse().map_err(|_| format!("annotation {ADDRESSES}: {each:?} is no address"))?;
        if found.iter().any(|other| other.is_ipv4() == address.is_ipv4()) {
            return Err(format!("annotation {ADDRESSES}: name at most one address of each family"));
        }
        found.push(address);
    }
    Ok(found)
}

impl Wanted {
    /// The steps to the wanted addresses. `shown` are those in the Service's status, and stay rather than others.
    pub(crate) fn plan(&self, has: &[Assignment], shown: &[IpAddr], pools: &[(String, IpPool)]) -> Plan {
        let mut plan = Plan::default();
        match self {
            Self::Nothing => plan.release = has.to_vec(),
            Self::These(wanted) => {
                let (kept, released): (Vec<_>, Vec<_>) =
                    has.iter().partition(|one| wanted.contains(&one.address));
                plan.release = released;
                let missing = wanted.iter().filter(|it| !kept.iter().any(|one| one.address == **it));
                plan.assign = missing.copied().map(Missing::This).collect();
            }
            Self::OneOf(families) => {
                for one in has {
                    if !families.iter().any(|(family, _)| *family == Family::of(&one.block)) {
                        plan.release.push(*one);
                    }
                }
                for (family, chosen) in families {
                    let mut fit: Vec<&Assignment> = Vec::new();
                    for one in has.iter().filter(|one| Family::of(&one.block) == *family) {
                        match fits(one.address, chosen, pools) {
                            true => fit.push(one),
                            false => plan.release.push(*one),
                        }
                    }
                    // Somebody may be about to show the newest one.
                    fit.sort_by_key(|one| !shown.contains(&one.address));
                    match fit.split_first() {
                        Some((_, others)) => plan.release.extend(others.iter().copied()),
                        None => plan.assign.push(Missing::Any(*family, chosen.clone())),
                    }
                }
            }
        }
        plan
    }
}

/// Whether an address is from one of the chosen pools. Without a choice, only one from a manual pool does not fit: it was
/// asked for before.
fn fits(address: IpAddr, chosen: &[String], pools: &[(String, IpPool)]) -> bool {
    let pool = pools.iter().find(|(_, pool)| pool.spec.cidr.contains(&address));
    if chosen.is_empty() {
        return pool.is_none_or(|(_, pool)| pool.spec.assignment_mode.as_deref() != Some("Manual"));
    }
    chosen.iter().any(|wanted| match wanted.parse::<IpNet>() {
        Ok(net) => net.contains(&address),
        Err(_) => pool.is_some_and(|(name, _)| name == wanted),
    })
}
