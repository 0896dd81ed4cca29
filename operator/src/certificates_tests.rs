use super::*;

const NOW: Timestamp = Timestamp::constant(1_800_000_000, 0);

fn rule() -> Rule {
    Rule::new(&forebay_api::cluster::Certificates::default())
}

fn hours(h: i64) -> SignedDuration {
    SignedDuration::from_hours(h)
}

fn leaf() -> Leaf {
    Leaf {
        secret: "a-0-tls".to_owned(),
        name: "a-0".to_owned(),
        dns: ["a-0.ns.forebay.internal".to_owned()].into(),
        ips: ["10.0.0.1".parse().expect("an address"), "fd00::1".parse().expect("an address")].into(),
        server: true,
        instance: Some("a-0".to_owned()),
    }
}

fn issued() -> (Authority, Data) {
    let authority = Authority::create("a", NOW, rule()).expect("an authority");
    let pair = authority.issue(&leaf(), NOW, rule()).expect("a certificate");
    let data = secret_data(&pair, &authority);
    (authority, data)
}

#[test]
fn certificate_is_kept_until_its_renewal_time() {
    let (authority, data) = issued();
    let Due::Keep(renewal) = due(NOW, rule(), &authority, &leaf(), Some(&data)) else { panic!("not kept") };
    assert!((renewal.duration_since(NOW) - hours(60 * 24)).abs() <= BACKDATE);
    assert_eq!(authority_step(NOW, rule(), Some(&authority)), AuthorityStep::Keep);
    let just_before = renewal - SignedDuration::from_secs(1);
    assert!(matches!(due(just_before, rule(), &authority, &leaf(), Some(&data)), Due::Keep(_)));
    assert_eq!(due(renewal, rule(), &authority, &leaf(), Some(&data)), Due::Issue("it expires soon"));
}

#[test]
fn invalid_or_outdated_certificate_is_reissued() {
    let (authority, data) = issued();
    let of = |leaf: &Leaf, data: &Data| due(NOW, rule(), &authority, leaf, Some(data));
    let with = |key: &str, value: &[u8]| {
        let mut data = data.clone();
        data.insert(key.to_owned(), ByteString(value.to_vec()));
        data
    };
    assert_eq!(due(NOW, rule(), &authority, &leaf(), None), Due::Issue("it does not exist"));
    assert_eq!(of(&leaf(), &Data::new()), Due::Issue("it is incomplete"));
    assert_eq!(of(&leaf(), &with(tls::CERTIFICATE, b"rubbish")), Due::Issue("it cannot be parsed"));
    assert_eq!(of(&leaf(), &with(tls::CERTIFICATE, &[0xff, 0xfe])), Due::Issue("it is incomplete"));
    let other = KeyPair::generate().expect("a key").serialize_pem();
    assert_eq!(of(&leaf(), &with(tls::KEY, other.as_bytes())), Due::Issue("its key does not match"));
    let moved = Leaf { ips: ["10.0.0.2".parse().expect("an address")].into(), ..leaf() };
    assert_eq!(of(&moved, &data), Due::Issue("names or addresses have changed"));
    let stranger = Authority::create("a", NOW, rule()).expect("an authority");
    assert_eq!(due(NOW, rule(), &stranger, &leaf(), Some(&data)), Due::Issue("the authority has changed"));
    assert!(matches!(of(&leaf(), &with(tls::AUTHORITY, b"")), Due::Bundle(_)));
}

#[test]
fn shorter_validity_applies_to_existing_certificates() {
    let (authority, data) = issued();
    let short = Rule { validity: hours(2), renew_before: hours(1) };
    assert!(matches!(due(NOW, short, &authority, &leaf(), Some(&data)), Due::Keep(_)));
    assert_eq!(due(NOW + hours(1), short, &authority, &leaf(), Some(&data)), Due::Issue("it expires soon"));
}

#[test]
fn every_rule_leaves_time_before_and_after_the_renewal() {
    for (validity_hours, renew_before_hours) in [(1, 0), (2, 1), (24, 23), (87600, 0), (87600, 87599), (0, 5)]
    {
        let spec = forebay_api::cluster::Certificates { validity_hours, renew_before_hours };
        let rule = Rule::new(&spec);
        assert!(rule.renew_before >= rule.validity / 10, "{spec:?}");
        assert!(rule.renew_before <= rule.validity - rule.validity / 10, "{spec:?}");
        let authority = Authority::create("a", NOW, rule).expect("an authority");
        let pair = authority.issue(&leaf(), NOW, rule).expect("a certificate");
        let data = secret_data(&pair, &authority);
        assert!(matches!(due(NOW, rule, &authority, &leaf(), Some(&data)), Due::Keep(_)), "{spec:?}");
        let end = parse(&authority.current.certificate).expect("it is one").not_after;
        assert!(end > NOW + rule.validity, "what is signed outlives the authority: {spec:?}");
    }
}

/// At every hour of two replacements of the authority, each certificate in use is verified by each bundle in use, where "in
/// use" means published within the last hour.
#[test]
fn authority_rotation_keeps_every_peer_trusted() {
    let rule = rule();
    let mut authority = Authority::create("a", NOW, rule).expect("an authority");
    let mut data = secret_data(&authority.issue(&leaf(), NOW, rule).expect("a certificate"), &authority);
    let mut published = vec![(NOW, data.clone())];
    let mut steps = Vec::new();
    let end = parse(&authority.current.certificate).expect("it is one").not_after;
    let mut now = end - rule.authority_renew_before() - hours(2);
    // Apart from renewals, nothing happens in the years before and after.
    let last = now + hours(12);
    while now < last {
        let step = authority_step(now, rule, Some(&authority));
        if step != AuthorityStep::Keep {
            steps.push(step);
            authority = authority.after(step, "a", now, rule).expect("a step");
        }
        match due(now, rule, &authority, &leaf(), Some(&data)) {
            Due::Keep(_) => {}
            Due::Bundle(_) => {
                data.insert(tls::AUTHORITY.to_owned(), ByteString(authority.bundle().into_bytes()));
            }
            Due::Issue(_) => {
                data = secret_data(&authority.issue(&leaf(), now, rule).expect("a certificate"), &authority);
            }
        }
        published.push((now, data.clone()));
        published.retain(|(at, _)| now.duration_since(*at) < SETTLE || *at == now);
        for (_, theirs) in &published {
            for (_, ours) in &published {
                let bundle = split(&text(ours, tls::AUTHORITY).expect("a bundle"));
                let certificate = text(theirs, tls::CERTIFICATE).expect("a certificate");
                assert!(bundle.iter().any(|ca| signed_by(&certificate, ca)), "untrusted at {now}");
            }
        }
        now += SignedDuration::from_mins(30);
    }
    assert_eq!(steps, [AuthorityStep::AddNext, AuthorityStep::Promote, AuthorityStep::Forget]);
    assert_eq!(authority, Authority::read(&authority.write()).expect("it reads what it wrote"));
}

/// The operator was down when the next authority was due to sign. Certificates that it signs late have just as long to
/// arrive.
#[test]
fn former_authority_is_trusted_long_enough_after_a_late_promotion() {
    let first = Authority::create("a", NOW, rule()).expect("an authority");
    let adding = first.after(AuthorityStep::AddNext, "a", NOW, rule()).expect("a step");
    let late = NOW + hours(48);
    assert_eq!(authority_step(late, rule(), Some(&adding)), AuthorityStep::Promote);
    let promoted = adding.after(AuthorityStep::Promote, "a", late, rule()).expect("a step");
    let promoted = Authority::read(&promoted.write()).expect("it reads what it wrote");
    let before = late + SETTLE - SignedDuration::from_secs(1);
    assert_eq!(authority_step(before, rule(), Some(&promoted)), AuthorityStep::Keep);
    assert_eq!(authority_renewal(rule(), &promoted), Some(late + SETTLE));
    assert_eq!(authority_step(late + SETTLE, rule(), Some(&promoted)), AuthorityStep::Forget);
}

#[test]
fn authority_mid_rotation_round_trips_through_its_secret() {
    let first = Authority::create("a", NOW, rule()).expect("an authority");
    let adding = first.clone().after(AuthorityStep::AddNext, "a", NOW, rule()).expect("a step");
    assert_eq!(Authority::read(&adding.write()).as_ref(), Some(&adding));
    let promoted = adding.after(AuthorityStep::Promote, "a", NOW, rule()).expect("a step");
    assert_eq!(Authority::read(&promoted.write()).as_ref(), Some(&promoted));
    assert_eq!(promoted.former.len(), 1);
    assert_eq!(split(&promoted.bundle()).len(), 2);
}

#[test]
fn missing_or_expired_authority_is_recreated() {
    assert_eq!(authority_step(NOW, rule(), None), AuthorityStep::Create);
    let (authority, _) = issued();
    let end = parse(&authority.current.certificate).expect("it is one").not_after;
    assert_eq!(authority_step(end, rule(), Some(&authority)), AuthorityStep::Create);
    let mut data = authority.write();
    data.insert(tls::KEY.to_owned(), ByteString(b"rubbish".to_vec()));
    assert_eq!(Authority::read(&data), None);
}

#[test]
fn debug_output_contains_no_private_key() {
    let (authority, _) = issued();
    assert!(!format!("{authority:?}").contains("PRIVATE KEY"));
}
