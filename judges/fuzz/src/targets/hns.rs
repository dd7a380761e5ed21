//! What HNS answers, and files of operators on Windows.

use serde_json::json;
use tortie_hcn::parsers;
use tortie_hcn::schema::{
    Acl, Endpoint, HostRoute, LoadBalancer, Network, OutBoundNat, Policy, PolicySettings, PortMapping, Query,
    RemoteSubnetRoute, SdnRoute, SetPolicy, VxlanPort, lenient, strict,
};
use tortie_hcn::selftest::HnsReport;
use tortie_hcn::{Call, ErrorRecord, Failure, Guid, Hcn, HcnExt, Kind, Version};
use tortie_windows::{AdapterSelector, StaticRules, existing_network, kube_proxy_flags, source_vips};

use crate::input::same;

/// An HNS that answers each call with a text: a failure if it begins with `!`. Texts end with NUL, and the last one is repeated.
struct Answers<'a>(&'a [&'a str], std::sync::atomic::AtomicUsize);

impl Hcn for Answers<'_> {
    fn call(&self, _: &Call) -> Result<String, Failure> {
        let next = self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let text = self.0.get(next).or(self.0.last()).copied().unwrap_or_default();
        match text.strip_prefix('!') {
            Some(record) => {
                let code = lenient::<ErrorRecord>(record).map(|record| record.error_code).unwrap_or_default();
                Err(Failure { code: tortie_hcn::HResult(code), record: record.to_owned() })
            }
            None => Ok(text.to_owned()),
        }
    }
}

/// The answers of HNS to calls, as typed documents and as what an agent makes of them. Documents can be sent back unchanged.
pub fn hns_reply(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let texts: Vec<&str> = text.split('\0').collect();
    let hns = || Answers(&texts, std::sync::atomic::AtomicUsize::new(0));
    let id = Guid::ZERO;
    let _ = (hns().version(), hns().enumerate(Kind::Endpoint, &Query::all()), hns().load_balancer(id));
    let _ = (hns().namespace(id), hns().endpoints_of_network(id), hns().networks(), hns().attach_to_host(id));
    let _ = existing_network(&hns(), "Calico");
    if let Ok(network) = hns().network(id) {
        let flags = kube_proxy_flags(&network, Version { major: 13, minor: 2 }, None);
        let _ = (flags, source_vips(&network).count(), network.subnets().count());
        read_policies(&network.policies);
        sent_back(&network, strict::<Network>);
    }
    if let Ok(endpoint) = hns().endpoint(id) {
        read_policies(&endpoint.policies);
        sent_back(&endpoint, strict::<Endpoint>);
    }
    let _ = lenient::<LoadBalancer>(texts[0]);
}

/// A document can be sent back: what is written is read as before.
fn sent_back<T>(document: &T, check: impl Fn(&str) -> Result<T, tortie_hcn::schema::DocumentError>)
where
    T: serde::Serialize + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let Ok(written) = serde_json::to_string(document) else { return };
    let again = lenient::<T>(&written).unwrap_or_else(|error| panic!("{error}: {written}"));
    assert!(same(&json!(again), &json!(document)), "{again:?} {written}");
    let _ = check(&written);
}

fn read_policies(policies: &[Policy]) {
    fn read<T: PolicySettings>(policy: &Policy) {
        if let Ok(Some(settings)) = policy.settings::<T>() {
            assert!(Policy::of(&settings).is::<T>());
        }
    }
    for policy in policies {
        read::<Acl>(policy);
        read::<SetPolicy>(policy);
        read::<OutBoundNat>(policy);
        read::<PortMapping>(policy);
        read::<HostRoute>(policy);
        read::<SdnRoute>(policy);
        read::<RemoteSubnetRoute>(policy);
        read::<VxlanPort>(policy);
    }
}

/// A frame on the socket of a process that implements HNS. What is read can be written, and is then read as before.
pub fn hns_frame(bytes: &[u8]) {
    if let Ok(answer) = parsers::answer(bytes)
        && let Ok(written) = parsers::answer_bytes(answer.clone())
    {
        assert_eq!(parsers::answer(&written).ok(), Some(answer));
    }
    if let Ok(Some(call)) = parsers::call(bytes)
        && let Ok(written) = parsers::call_bytes(&call)
    {
        assert_eq!(format!("{:?}", parsers::call(&written).ok().flatten()), format!("{:?}", Some(call)));
    }
}

/// The saved report of a selftest.
pub fn hns_report(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(report) = HnsReport::parse(text) {
        let _ = report.proves_sets(Version { major: 13, minor: 2 }, Some("20348"));
        let written = serde_json::to_string(&report).unwrap_or_default();
        assert_eq!(HnsReport::parse(&written), Ok(report), "{written}");
    }
}

/// The file of static rules, and the option that selects an adapter.
pub fn static_rules(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let _ = text.parse::<AdapterSelector>();
    if let Ok(rules) = StaticRules::parse(text) {
        let _ = rules.reported();
    }
}
