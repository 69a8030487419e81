"""A server on the loopback that answers POST requests as they ask it to, for tests of rewards behind servers.

  answer_server.py FOLDER [CERTIFICATE KEY]

Writes its port to FOLDER/port, and a line of JSON per request to FOLDER/requests: its path, body and Authorization.
The path has what it does with the n-th request of a body, one after the other, the last one from then on:
/ok answers {"index": the request's, "reward": of that index}, /chat an OpenAI-style answer, whose text is the number
of words in the prompt, /unless:TEXT the status 503 to a body with a text, /500 that status, /429:2 also asks to wait for 2 s, and others are below.
"""
import http.server
import json
import os
import socket
import ssl
import struct
import sys
import threading
import time
import urllib.parse

folder = sys.argv[1]
lock = threading.Lock()
tries = {}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and body are sent apart

    def do_POST(self):
        self.path = urllib.parse.unquote(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        key = self.headers.get("Authorization", "")
        with lock:
            count = tries[self.path, body] = tries.get((self.path, body), 0) + 1
            with open(folder + "/requests", "a") as log:
                log.write(json.dumps({"path": self.path, "body": json.loads(body), "key": key, "try": count,
                                      "time": time.monotonic()}) + "\n")
        actions = self.path.strip("/").split("/")
        if self.path.startswith("/unless:"):
            actions = [self.path[1:]]
        action, _, argument = actions[min(count, len(actions)) - 1].partition(":")
        request = json.loads(body)
        if action == "unless":
            action, argument = "503" if argument in json.dumps(request) else "ok", ""
        if action == "ok":
            time.sleep(float(argument or 0))
            self.answer(200, json.dumps(self.reward(request)))
        elif action == "chat":
            words = len(request["messages"][-1]["content"].split())
            text = argument.replace("N", str(words)).replace("SEED", str(request["seed"])) or str(words)
            self.answer(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}))
        elif action.isdigit():
            self.answer(int(action), "no, " + key, {"Retry-After": argument} if argument else {})
        elif action == "redirect":
            self.answer(307, "", {"Location": "http://" + argument.replace("_", "/")})
        elif action == "text":
            self.answer(200, argument)
        elif action == "huge":
            self.answer(200, "x" * (3 << 20))
        elif action == "half":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b'{"index": 1')
            self.close_connection = True
        elif action == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        elif action == "endless":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while True:
                self.wfile.write(b"1000\r\n" + b" " * 4096 + b"\r\n")
        elif action == "never":
            time.sleep(1000)

    @staticmethod
    def reward(request):
        if isinstance(request, list):
            return [Handler.reward(one) for one in request]
        return {"index": request["index"], "reward": request["index"] / 100}

    def answer(self, status, text, headers=()):
        data = text.encode()
        self.send_response(status)
        for name in headers:
            self.send_header(name, headers[name])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        pass


wanted = int(os.environ.get("ANSWER_PORT", "0"))
server = Server(("127.0.0.1", wanted), Handler)
if len(sys.argv) > 2:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[2], sys.argv[3])
    server.socket = context.wrap_socket(server.socket, server_side=True)
with open(folder + "/port.new", "w") as file:
    file.write(str(server.server_address[1]))
os.rename(folder + "/port.new", folder + "/port")
server.serve_forever()
