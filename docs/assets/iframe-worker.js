/* A page that is opened as a file may start no worker, so the search would find nothing: there this does a worker's
   work in a hidden frame. From a server the browser's own workers are used. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      window.addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow) return
        const told = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(told)
        if (this.onmessage) this.onmessage(told)
      })
      const page = this.frame.contentWindow.document
      page.open()
      page.write(`<script>
        var importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script")
          Object.assign(script, { src: url, onload: done, onerror: failed })
          document.body.append(script)
        })), Promise.resolve())
        var postMessage = data => parent.postMessage(data, "*")
      </script><body><script src="${new URL(url, location.href)}"></script></body>`)
      page.close()
      this.ready = new Promise(done => this.frame.addEventListener("load", done))
    }
    postMessage(data) { this.ready.then(() => this.frame.contentWindow.postMessage(data, "*")) }
    terminate() { this.frame.remove() }
  }
}
