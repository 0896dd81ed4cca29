"""Foreign clients against a server: the same checks for each client and each protection of its traffic.

Run as `clients.py TARGET.json GROUP [FILTER]`; `clients.py --groups` lists the groups, which can run in parallel. Prints
one line per check, `ok NAME` or `not ok NAME: REASON`, and `done` at the end: a missing `done` is a failure.
"""

import contextlib
import functools
import hashlib
import hmac
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import time
from unittest import mock

if sys.argv[1] == "--groups":
    TARGET = dict.fromkeys(["host", "port", "volume", "other", "kerberos"])
else:
    with open(sys.argv[1]) as target:
        TARGET = json.load(target)
HOST, PORT = TARGET["host"], TARGET["port"]
VOLUME, OTHER = TARGET["volume"], TARGET["other"]
FILTER = sys.argv[3] if len(sys.argv) > 3 else ""

# Empty, short, not a multiple of anything, beyond 64 KiB (several credits), several I/Os of 1 MiB.
SIZES = [0, 1, 4097, 200_001, 3 * 1024 * 1024 + 17]


def contents(size, seed):
    return random.Random(seed).randbytes(size)


class Refused(Exception):
    """The server refused the request."""


class Smbclient:
    name = "smbclient"
    variants = {
        "3.1.1-plain": ["SMB3_11", "off"],
        "3.1.1-sign": ["SMB3_11", "sign"],
        "3.1.1-sign-gmac": ["SMB3_11", "sign", "client smb3 signing algorithms=aes-128-gmac"],
        "3.1.1-sign-cmac": ["SMB3_11", "sign", "client smb3 signing algorithms=aes-128-cmac"],
        "3.1.1-sign-hmac": ["SMB3_11", "sign", "client smb3 signing algorithms=hmac-sha-256"],
        "3.1.1-encrypt": ["SMB3_11", "encrypt"],
        "3.1.1-encrypt-128-gcm": ["SMB3_11", "encrypt", "client smb3 encryption algorithms=aes-128-gcm"],
        "3.1.1-encrypt-128-ccm": ["SMB3_11", "encrypt", "client smb3 encryption algorithms=aes-128-ccm"],
        "3.1.1-encrypt-256-gcm": ["SMB3_11", "encrypt", "client smb3 encryption algorithms=aes-256-gcm"],
        "3.1.1-encrypt-256-ccm": ["SMB3_11", "encrypt", "client smb3 encryption algorithms=aes-256-ccm"],
        "3.0.2-encrypt": ["SMB3_02", "encrypt"],
        "3.0-sign": ["SMB3_00", "sign"],
        "2.1-sign": ["SMB2_10", "sign"],
        "2.0.2-sign": ["SMB2_02", "sign"],
    }

    def __init__(self, variant, volume, user, password):
        self.protocol, self.protection, *options = self.variants[variant]
        self.options = [f"--option={option}" for option in options]
        self.share = f"//{HOST}/{volume}"
        self.scratch = tempfile.TemporaryDirectory()
        self.auth = os.path.join(self.scratch.name, "auth")
        # No other user may enter the folder.
        with open(self.auth, "w") as f:
            f.write(f"username={user}\npassword={password}\n")
        self.user = user
        self.run("ls")

    def run(self, command):
        login = ["-A", self.auth] if self.user else ["-N", "-U", "%"]
        done = subprocess.run(
            ["smbclient", self.share, "-p", str(PORT), *login, "-m", self.protocol,
             f"--client-protection={self.protection}", "--option=client min protocol=SMB2_02", *self.options,
             "-c", command],
            capture_output=True, text=True, timeout=60,
        )
        # smbclient exits with 0 after some commands that failed: its output counts, too.
        if done.returncode != 0 or "NT_STATUS_" in done.stdout + done.stderr:
            raise Refused((done.stdout + done.stderr).strip())
        return done.stdout

    def access_list(self, path, *arguments):
        done = subprocess.run(
            ["smbcacls", "--numeric", self.share, path, *arguments, f"--option=smb ports={PORT}", "-A", self.auth, "-m", self.protocol,
             f"--client-protection={self.protection}", "--option=client min protocol=SMB2_02", *self.options],
            capture_output=True, text=True, timeout=60,
        )
        if done.returncode != 0 or "NT_STATUS_" in done.stdout + done.stderr:
            raise Refused((done.stdout + done.stderr).strip())
        return done.stdout

    def shares(self):
        done = subprocess.run(
            ["smbclient", "-L", f"//{HOST}", "-g", "-p", str(PORT), "-A", self.auth, "-m", self.protocol,
             f"--client-protection={self.protection}", "--option=client min protocol=SMB2_02", *self.options],
            capture_output=True, text=True, timeout=60,
        )
        if done.returncode != 0 or "NT_STATUS_" in done.stdout + done.stderr:
            raise Refused((done.stdout + done.stderr).strip())
        return {name: kind for kind, name in re.findall(r"^(\w+)\|([^|]*)\|", done.stdout, re.M)}

    def put(self, path, data):
        local = os.path.join(self.scratch.name, "up")
        with open(local, "wb") as f:
            f.write(data)
        self.run(f'put "{local}" "{path}"')

    def get(self, path):
        local = os.path.join(self.scratch.name, "down")
        self.run(f'get "{path}" "{local}"')
        with open(local, "rb") as f:
            return f.read()

    def list(self, folder):
        # "  a name                 A      123  Sat Nov 21 12:36:20 2026", the attributes may be absent.
        entry = re.compile(r"^  (.+?)\s+([A-Z]*)\s+(\d+)  \w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}$", re.M)
        found = entry.findall(self.run(f'cd "{folder}"; ls'))
        return {name: int(size) for name, _, size in found if name not in (".", "..")}

    def rename(self, old, new):
        self.run(f'rename "{old}" "{new}" -f')

    def delete(self, path):
        self.run(f'del "{path}"')

    def mkdir(self, path):
        self.run(f'mkdir "{path}"')

    def rmdir(self, path):
        self.run(f'rmdir "{path}"')

    def close(self):
        self.scratch.cleanup()


class Impacket:
    name = "impacket"
    variants = {
        "3.1.1-sign": [0x0311, False],
        "3.1.1-encrypt": [0x0311, True],
        "3.0-encrypt": [0x0300, True],
        "3.0-sign": [0x0300, False],
        "2.1-sign": [0x0210, False],
        "2.0.2-sign": [0x0202, False],
    }

    def __init__(self, variant, volume, user, password):
        from impacket.smbconnection import SessionError, SMBConnection

        dialect, encrypt = self.variants[variant]
        self.session_error = SessionError
        self.volume = volume
        self.connection = SMBConnection(HOST, HOST, sess_port=PORT, preferredDialect=dialect, timeout=30)
        inner = self.connection.getSMBServer()
        # No public option for these: otherwise the server decides about signing, and encryption is used wherever it is offered.
        inner._Connection["RequireSigning"] = True
        if not encrypt:
            inner._Connection["SupportsEncryption"] = False
        verified = self.verify(inner)
        try:
            self.connection.login(user, password)
            self.connection.connectTree(volume)
        except SessionError as error:
            raise Refused(str(error)) from error
        encrypted = bool(inner._Session["SessionFlags"] & 4)
        assert encrypted == encrypt, f"encrypted: {encrypted}, wanted: {encrypt}"
        assert self.connection.getDialect() == dialect, f"dialect {self.connection.getDialect():#x}"
        # At least those to SESSION_SETUP and TREE_CONNECT.
        assert len(verified) >= 2, f"{len(verified)} answers were verified"

    @staticmethod
    def verify(inner):
        """Verifies the signature or the tag of every answer, which impacket does not do; returns the list of verified answers."""
        from Cryptodome.Cipher import AES
        from Cryptodome.Hash import CMAC

        session, transport, signed, verified = inner._Session, inner._NetBIOSSession, [], []
        receive = transport.recv_packet

        def key():
            return session["SigningKey" if inner._Connection["Dialect"] >= 0x0300 else "SessionKey"]

        def verify_signed(message):
            # [MS-SMB2] 3.1.4.1: over the message with zeros in the field of the signature.
            blank = message[:48] + bytes(16) + message[64:]
            if inner._Connection["Dialect"] >= 0x0300:
                right = CMAC.new(key(), blank, ciphermod=AES).digest()
            else:
                right = hmac.digest(key(), blank, "sha256")[:16]
            assert message[48:64] == right, f"wrong signature: {message[:64].hex()}"

        def verify_sealed(message):
            # [MS-SMB2] 2.2.41: SMB2 TRANSFORM_HEADER. impacket supports only AES-128-CCM.
            cipher = AES.new(session["DecryptionKey"], AES.MODE_CCM, message[20:31])
            cipher.update(message[20:52])
            cipher.decrypt_and_verify(message[52:], message[4:20])

        def checked(timeout=None):
            answer = receive(timeout)
            message = answer.get_trailer()
            if message[:4] == b"\xfdSMB":
                verify_sealed(message)
                verified.append(message)
            else:
                status, flags = struct.unpack("<8xI4xI", message[:20])
                assert not session["SessionFlags"] & 4, f"in clear, though encrypted: {message[:64].hex()}"
                if flags & 8:
                    signed.append(message)
                else:
                    # [MS-SMB2] 3.2.5.1.3: an interim answer need not be signed.
                    assert status == 0x0103 or not session["SigningActivated"], f"not signed: {message[:64].hex()}"
            # The answer that completes the logon yields the key that signs it, so its verification waits for the next one.
            while signed and key():
                verify_signed(signed[0])
                verified.append(signed.pop(0))
            return answer

        transport.recv_packet = checked
        return verified

    def shares(self):
        return {share["shi1_netname"][:-1]: share["shi1_type"] for share in self.connection.listShares()}

    def call(self, pipe, interface, request):
        """One remote procedure call over a named pipe."""
        from impacket.dcerpc.v5 import transport

        rpc = transport.SMBTransport(HOST, PORT, rf"\{pipe}", smb_connection=self.connection).get_dce_rpc()
        rpc.connect()
        rpc.bind(interface)
        try:
            return request(rpc)
        finally:
            rpc.disconnect()

    def put(self, path, data):
        chunks = [data[at : at + 300_000] for at in range(0, len(data), 300_000)] + [b""]
        self.connection.putFile(self.volume, path, lambda _: chunks.pop(0))

    def get(self, path):
        data = bytearray()
        self.connection.getFile(self.volume, path, data.extend)
        return bytes(data)

    def list(self, folder):
        entries = self.connection.listPath(self.volume, folder + "\\*")
        return {e.get_longname(): e.get_filesize() for e in entries if e.get_longname() not in (".", "..")}

    def rename(self, old, new):
        self.connection.rename(self.volume, old, new)

    def delete(self, path):
        self.connection.deleteFile(self.volume, path)

    def mkdir(self, path):
        self.connection.createDirectory(self.volume, path)

    def rmdir(self, path):
        self.connection.deleteDirectory(self.volume, path)

    def close(self):
        self.connection.logoff()
        self.connection.close()


class AnonymousNtlm:
    """Requests an anonymous logon, [MS-NLMP] 3.2.5.1.2, in place of pyspnego's context, which does not support it."""

    complete = False
    # The null key, with which an anonymous session would sign.
    session_key = bytes(16)

    def __init__(self, *_arguments, **_options):
        pass

    def step(self, challenge):
        from spnego._ntlm_raw.messages import Authenticate, Negotiate, NegotiateFlags

        flags = NegotiateFlags.unicode | NegotiateFlags.ntlm | NegotiateFlags.extended_session_security
        if not challenge:
            return Negotiate(flags | NegotiateFlags.request_target).pack()
        self.complete = True
        return Authenticate(flags | NegotiateFlags.anonymous, lm_challenge_response=b"\0").pack()


class Smbprotocol:
    name = "smbprotocol"
    variants = {"3.1.1-sign": False, "3.1.1-encrypt": True}

    def __init__(self, variant, volume, user, password):
        import smbclient
        from smbprotocol.exceptions import SMBAuthenticationError, SMBException, SMBResponseException

        self.api = smbclient
        self.cache = {}
        self.root = rf"\\{HOST}\{volume}"
        self.options = {"port": PORT, "connection_cache": self.cache}
        encrypt = self.variants[variant]
        ntlm = contextlib.nullcontext() if user else mock.patch("spnego.client", AnonymousNtlm)
        try:
            with ntlm:
                session = smbclient.register_session(
                    HOST, username=user, password=password, encrypt=encrypt, auth_protocol="ntlm", **self.options
                )
            smbclient.listdir(self.root, username=user, password=password, **self.options)
        except (SMBAuthenticationError, SMBResponseException, SMBException) as error:
            raise Refused(str(error)) from error
        self.options |= {"username": user, "password": password}
        assert session.connection.dialect == 0x0311, f"dialect {session.connection.dialect:#x}"
        assert session.encrypt_data == encrypt, f"encrypted: {session.encrypt_data}, wanted: {encrypt}"

    def path(self, path):
        return self.root + "\\" + path

    def put(self, path, data):
        with self.api.open_file(self.path(path), mode="wb", **self.options) as f:
            f.write(data)

    def get(self, path):
        with self.api.open_file(self.path(path), mode="rb", **self.options) as f:
            return f.read()

    def list(self, folder):
        return {e.name: e.smb_info.end_of_file for e in self.api.scandir(self.path(folder), **self.options)}

    def rename(self, old, new):
        self.api.replace(self.path(old), self.path(new), **self.options)

    def delete(self, path):
        self.api.remove(self.path(path), **self.options)

    def mkdir(self, path):
        self.api.mkdir(self.path(path), **self.options)

    def rmdir(self, path):
        self.api.rmdir(self.path(path), **self.options)

    def close(self):
        self.api.reset_connection_cache(connection_cache=self.cache)


def check(name, body):
    if FILTER not in name:
        return
    try:
        body()
        print(f"ok {name}", flush=True)
    except Exception as error:  # any exception of a client is a failed check
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"not ok {name}: {reason[:2000]}", flush=True)


def same(found, expected):
    digest = lambda data: f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()[:16]}"
    assert found == expected, f"found {digest(found)}, expected {digest(expected)}"


def refused(body):
    try:
        client = body()
    except Refused as error:
        # A broken connection is not a refusal.
        said = str(error)
        words = ["LOGON_FAILURE", "ACCESS_DENIED", "0xc000006d", "0xc0000022", "NETWORK_ACCESS_DENIED"]
        assert any(word in said for word in words), f"refused, but how: {said}"
        return
    client.close()
    raise AssertionError("admitted")


def checks(client_class, variant):
    prefix = f"{client_class.name}.{variant}"
    folder = f"foreign {prefix}"

    def connect(volume=VOLUME, user=VOLUME["user"], password=VOLUME["password"]):
        return client_class(variant, volume["share"], user, password)

    def with_client(body):
        def run():
            client = connect()
            try:
                body(client)
            finally:
                client.close()

        return run

    def put_get(client):
        client.mkdir(folder)
        for size in SIZES:
            client.put(f"{folder}\\{size}", contents(size, size))
        for size in SIZES:
            same(client.get(f"{folder}\\{size}"), contents(size, size))

    def listing(client):
        found = client.list(folder)
        assert found == {str(size): size for size in SIZES}, f"listed {found}"

    def overwrite(client):
        # Shorter than before: the old tail must be removed.
        client.put(f"{folder}\\200001", b"short")
        same(client.get(f"{folder}\\200001"), b"short")

    def rename(client):
        client.rename(f"{folder}\\4097", f"{folder}\\Übergrößen träger 日本")
        same(client.get(f"{folder}\\Übergrößen träger 日本"), contents(4097, 4097))
        names = set(client.list(folder))
        assert names == {"0", "1", "200001", str(SIZES[-1]), "Übergrößen träger 日本"}, f"listed {names}"

    def delete(client):
        for name in client.list(folder):
            client.delete(f"{folder}\\{name}")
        assert client.list(folder) == {}, f"left over: {client.list(folder)}"
        client.rmdir(folder)

    def extended_attributes(client):
        path = f"attributes {prefix}"
        client.put(path, b"content")
        client.run(f'setea "{path}" epoch 12; setea "{path}" origin another; setea "{path}" epoch thirteen')
        found = client.run(f'geteas "{path}"')
        names = re.findall(r"^(\S+) \(\d+\) =", found, re.M)
        assert sorted(names) == ["epoch", "origin"] and "thirteen" in found and "another" in found, found
        client.delete(path)

    def access_lists(client):
        path = f"list {prefix}"
        client.put(path, b"content")
        read_only = "ACL:S-1-1-0:0/0x0/0x001a00a9"
        client.access_list(path, "--set", f"REVISION:1,{read_only}")
        assert read_only in client.access_list(path), client.access_list(path)
        assert client.get(path) == b"content"
        refused(lambda: client.put(path, b"other") or client)
        client.access_list(path, "--add", "ACL:S-1-1-0:0/0x0/0x001f01ff")
        client.put(path, b"other")
        assert client.get(path) == b"other"
        client.delete(path)

    def shares(client):
        found = client.shares()
        assert VOLUME["share"] in found and "IPC$" in found, f"listed {found}"

    def no_other_shares(client):
        found = client.shares()
        assert OTHER["share"] not in found, f"listed {found}"

    def calls(client):
        from impacket.dcerpc.v5 import rpcrt, srvs, wkst

        def served(rpc):
            for level in (0, 1, 501):
                info = srvs.hNetrShareGetInfo(rpc, VOLUME["share"] + "\0", level)["InfoStruct"][f"ShareInfo{level}"]
                assert info[f"shi{level}_netname"] == VOLUME["share"] + "\0", info.dump()
            for level in (0, 1, 501):
                assert srvs.hNetrShareEnum(rpc, level)["TotalEntries"] >= 2
            for level in (100, 101):
                info = srvs.hNetrServerGetInfo(rpc, level)["InfoStruct"][f"ServerInfo{level}"]
                assert info[f"sv{level}_platform_id"] == 500, info.dump()
            # NERR_NetNameNotFound ([MS-SRVS] 3.1.4.10); Samba's is ERROR_INVALID_NAME.
            try:
                srvs.hNetrShareGetInfo(rpc, "nosuchshare\0", 1)
            except rpcrt.DCERPCException as error:
                assert error.get_error_code() in (2310, 123), error
            else:
                raise AssertionError("a share that does not exist has been found")

        def workstation(rpc):
            info = wkst.hNetrWkstaGetInfo(rpc, 100)["WkstaInfo"]["WkstaInfo100"]
            assert info["wki100_platform_id"] == 500 and len(info["wki100_computername"]) > 1, info.dump()

        client.call("srvsvc", srvs.MSRPC_UUID_SRVS, served)
        client.call("wkssvc", wkst.MSRPC_UUID_WKST, workstation)

    check(f"{prefix}.put-get", with_client(put_get))
    if client_class in (Smbclient, Impacket):
        check(f"{prefix}.shares", with_client(shares))
    if client_class is Impacket:
        check(f"{prefix}.calls", with_client(calls))
    if prefix == "smbclient.3.1.1-sign":
        check(f"{prefix}.no-other-shares", with_client(no_other_shares))
    check(f"{prefix}.list", with_client(listing))
    check(f"{prefix}.overwrite", with_client(overwrite))
    check(f"{prefix}.rename", with_client(rename))
    check(f"{prefix}.delete", with_client(delete))
    if client_class is Smbclient:
        check(f"{prefix}.extended-attributes", with_client(extended_attributes))
    if prefix == "smbclient.3.1.1-sign":
        check(f"{prefix}.access-lists", with_client(access_lists))
    check(f"{prefix}.refuses-wrong-password", lambda: refused(lambda: connect(password="not the password")))
    check(f"{prefix}.refuses-unknown-user", lambda: refused(lambda: connect(user="unknown-user")))
    check(f"{prefix}.refuses-guest", lambda: refused(lambda: connect(user="guest", password="")))
    check(f"{prefix}.refuses-anonymous", lambda: refused(lambda: connect(user="", password="")))
    check(
        f"{prefix}.refuses-other-volumes-credentials",
        lambda: refused(lambda: connect(user=OTHER["user"], password=OTHER["password"])),
    )
    check(
        f"{prefix}.other-volume-opens-with-its-own",
        lambda: connect(OTHER, OTHER["user"], OTHER["password"]).close(),
    )


def smb1_negotiate(*dialects):
    """SMB_COM_NEGOTIATE, [MS-CIFS] 2.2.4.52.1, with its transport prefix."""
    names = b"".join(b"\x02" + name.encode() + b"\0" for name in dialects)
    header = b"\xffSMB\x72" + bytes(4) + b"\x18\x53\xc8" + bytes(20)
    message = header + b"\0" + struct.pack("<H", len(names)) + names
    return struct.pack(">I", len(message)) + message


def converse(request):
    """The first answer, or nothing if the server closes the connection."""
    with socket.create_connection((HOST, PORT), timeout=10) as connection:
        connection.sendall(request)
        answer = b""
        try:
            while len(answer) < 4 or len(answer) < 4 + struct.unpack(">I", answer[:4])[0]:
                more = connection.recv(65536)
                if not more:
                    return b""
                answer += more
        except ConnectionResetError:
            return b""
        return answer[4:]


def smb1():
    def alive():
        answer = converse(smb1_negotiate("SMB 2.002", "SMB 2.???"))
        assert answer[:4] == b"\xfeSMB", f"a multi-protocol negotiation after it was answered by {answer[:16]!r}"

    def raw():
        answer = converse(smb1_negotiate("PC NETWORK PROGRAM 1.0", "LANMAN1.0", "NT LM 0.12"))
        # Either closed, or "none of these" ([MS-CIFS] 2.2.4.52.2: DialectIndex 0xFFFF), never a choice.
        if answer:
            assert answer[:5] == b"\xffSMB\x72" and answer[32] >= 1, f"answered by {answer[:40]!r}"
            assert answer[33:35] == b"\xff\xff", f"dialect {answer[33:35]!r} chosen"
        alive()

    def multi_protocol():
        answer = converse(smb1_negotiate("NT LM 0.12", "SMB 2.002", "SMB 2.???"))
        assert answer[:4] == b"\xfeSMB", f"answered by {answer[:16]!r}"
        dialect = struct.unpack("<H", answer[68:70])[0]
        assert dialect == 0x02FF, f"dialect {dialect:#06x}"

    def smbclient_nt1():
        done = subprocess.run(
            ["smbclient", f"//{HOST}/{VOLUME['share']}", "-p", str(PORT), "-N", "-U", "x%x", "-m", "NT1",
             "--option=client min protocol=NT1", "-c", "ls"],
            capture_output=True, text=True, timeout=60,
        )
        said = done.stdout + done.stderr
        assert done.returncode != 0 and "protocol negotiation" in said.lower(), said
        alive()

    check("smb1.raw-negotiate-is-refused", raw)
    check("smb1.multi-protocol-negotiate-leads-to-smb2", multi_protocol)
    check("smb1.smbclient-nt1-is-refused", smbclient_nt1)


class Tickets:
    """A ticket cache, filled by kinit."""

    def __init__(self, user, password):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "tickets")
        self.environment = {**os.environ, "KRB5CCNAME": f"FILE:{self.path}"}
        self.call(["kinit", user], input=password + "\n")

    def call(self, command, **options):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=self.environment, **options)
        if done.returncode != 0 or "NT_STATUS_" in done.stdout + done.stderr:
            raise Refused((done.stdout + done.stderr).strip())
        return done.stdout

    def smbclient(self, command, host=None, share=VOLUME, protocol="SMB3_11", protection="sign", options=()):
        return self.call(
            ["smbclient", f"//{host or TARGET['kerberos']['name']}/{share['share']}", "-p", str(PORT), "--use-kerberos=required",
             "-m", protocol, f"--client-protection={protection}", "--option=client min protocol=SMB2_02",
             *(f"--option={option}" for option in options), "-c", command])


def kerberos():
    if not TARGET["kerberos"]:
        # Samba, which is not set up as a member of a domain here.
        return
    realm = TARGET["kerberos"]["realm"]
    keytab = "/scratch/kdc/server.keytab"
    alice = lambda: Tickets(VOLUME["user"], VOLUME["password"])

    def put_get(tickets, name, **how):
        data = contents(200_001, len(name))
        local = os.path.join(tickets.folder.name, "file")
        with open(local, "wb") as f:
            f.write(data)
        tickets.smbclient(f'put "{local}" "kerberos {name}"', **how)
        tickets.smbclient(f'get "kerberos {name}" "{local}"; del "kerberos {name}"', **how)
        with open(local, "rb") as f:
            same(f.read(), data)

    # AES-256 uses the whole session key, every other cipher its first half.
    for name, how in {
        "3.1.1-plain": {"protection": "off"},
        "3.1.1-sign": {},
        "3.1.1-encrypt-128-gcm": {"protection": "encrypt", "options": ["client smb3 encryption algorithms=aes-128-gcm"]},
        "3.1.1-encrypt-256-gcm": {"protection": "encrypt", "options": ["client smb3 encryption algorithms=aes-256-gcm"]},
        "3.1.1-encrypt-256-ccm": {"protection": "encrypt", "options": ["client smb3 encryption algorithms=aes-256-ccm"]},
        "3.0-encrypt": {"protocol": "SMB3_00", "protection": "encrypt"},
        "2.1-sign": {"protocol": "SMB2_10"},
    }.items():
        check(f"kerberos.smbclient.{name}", lambda name=name, how=how: put_get(alice(), name, **how))

    # Servers with keys of one encryption type, which their session keys then have, too. MIT's kvno requests the tickets:
    # smbclient would not do so for all types.
    def with_etype(host, etype):
        tickets = alice()
        tickets.call(["kvno", f"cifs/{host}.forebay.test"])
        listed = tickets.call(["klist", "-e"])
        assert listed.count(etype) >= 2, f"not both of {etype}: {listed}"
        put_get(tickets, host, host=f"{host}.forebay.test")

    for host, etype in {
        "aes128-sha1": "aes128-cts-hmac-sha1-96",
        "aes256-sha1": "aes256-cts-hmac-sha1-96",
        "aes128-sha2": "aes128-cts-hmac-sha256-128",
        "aes256-sha2": "aes256-cts-hmac-sha384-192",
    }.items():
        check(f"kerberos.smbclient.{host}", lambda host=host, etype=etype: with_etype(host, etype))

    def impacket():
        from impacket.smbconnection import SMBConnection

        name = TARGET["kerberos"]["name"]
        connection = SMBConnection(name, HOST, sess_port=PORT, preferredDialect=0x0311, timeout=30)
        verified = Impacket.verify(connection.getSMBServer())
        # impacket cannot read the answers of MIT's KDC to a logon, but it can use tickets of a cache.
        tickets = alice()
        tickets.call(["kvno", f"cifs/{name}"])
        with mock.patch.dict(os.environ, KRB5CCNAME=tickets.path):
            connection.kerberosLogin(VOLUME["user"], "", realm, kdcHost="127.0.0.1", useCache=True)
        connection.connectTree(VOLUME["share"])
        assert len(verified) >= 2, f"{len(verified)} answers were verified"
        connection.close()

    check("kerberos.impacket.3.1.1", impacket)

    def new_keys():
        old = alice()
        put_get(old, "before")
        subprocess.run(
            ["kadmin.local", "-q", f"ktadd -k {keytab} cifs/{TARGET['kerberos']['name']}"], check=True, capture_output=True,
            env={**os.environ, "KRB5_KDC_PROFILE": "/scratch/kdc/kdc.conf"}, timeout=60,
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                put_get(alice(), "after")
                break
            except Refused:
                assert time.monotonic() < deadline, "the new keys are not used after 30 s"
                time.sleep(0.2)
        put_get(old, "with an old ticket")

    check("kerberos.new-keys-without-a-restart", new_keys)
    check("kerberos.refuses-wrong-password", lambda: fails(lambda: Tickets(VOLUME["user"], "wrong"), "Password incorrect"))
    stranger = lambda: Tickets("stranger", "stranger").smbclient("ls")
    check("kerberos.refuses-a-user-without-a-volume", lambda: fails(stranger, "LOGON_FAILURE"))
    other = lambda: Tickets(OTHER["user"], OTHER["password"])
    check("kerberos.refuses-the-user-of-another-volume", lambda: fails(lambda: other().smbclient("ls"), "ACCESS_DENIED"))
    check("kerberos.other-volume-opens-with-its-own", lambda: other().smbclient("ls", share=OTHER))
    elsewhere = lambda: alice().smbclient("ls", host="elsewhere.forebay.test")
    check("kerberos.refuses-a-ticket-for-another-server", lambda: fails(elsewhere, "LOGON_FAILURE"))


def fails(body, word):
    try:
        body()
    except Refused as error:
        assert word in str(error), f"refused, but how: {error}"
        return
    raise AssertionError("admitted")


GROUPS = {}
for client_class in (Smbclient, Impacket, Smbprotocol):
    for variant in client_class.variants:
        GROUPS[f"{client_class.name}.{variant}"] = functools.partial(checks, client_class, variant)
GROUPS["smb1"] = smb1
GROUPS["kerberos"] = kerberos

if sys.argv[1] == "--groups":
    print("\n".join(GROUPS))
else:
    GROUPS[sys.argv[2]]()
    print("done")
